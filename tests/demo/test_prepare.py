"""Preparing the demo writes data, solutions and a model, once, and its splits share no problem."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path

import pytest

from trireme.config import ConfigError
from trireme.demo import prepare as demo
from trireme.demo.problems import SLIP_RATE, SURE_UP_TO, with_slips


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.prepare(tmp_path_factory.mktemp("assets"), seed=0)


def test_train_and_test_share_no_question(folder: Path) -> None:
    train, test, solved = (rows(folder / f"{n}.jsonl") for n in ("train", "test", "solved"))
    assert (len(train), len(test), len(solved)) == (
        demo.NUM_TRAIN,
        demo.NUM_TEST,
        demo.NUM_SOLVED,
    )
    assert len(test) >= 500
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    assert [row["question"] for row in solved] == [row["question"] for row in train[: len(solved)]]


def test_the_pupils_solutions_are_wrong_where_results_are_large(folder: Path) -> None:
    train, solved = (rows(folder / f"{n}.jsonl") for n in ("train", "solved"))
    results = [
        [int(line.split(" = ")[1][:-1]) for line in row["answer"].split("\n")[:-1]]
        for row in train[: len(solved)]
    ]
    pairs = list(zip(results, train, solved, strict=False))
    assert all(t == s for r, t, s in pairs if max(r) <= SURE_UP_TO)
    large = [t != s for r, t, s in pairs if max(r) > SURE_UP_TO]
    assert SLIP_RATE < sum(large) / len(large) < 1


def test_a_slip_is_carried_on() -> None:
    class Always(random.Random):
        def random(self) -> float:
            return 0.0

    solution = "Anna has 5 + 4 = 9.\nLeft are 9 - 6 = 3.\n#### 3"
    slipped = "Anna has 5 + 4 = 8.\nLeft are 8 - 6 = 2.\n#### 2"
    assert with_slips(solution, Always()) == slipped


def test_a_second_time_writes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    demo.prepare(folder, seed=0)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert before == after


def test_the_demo_points_its_yaml_at_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", str(tmp_path))
    config = demo.demo_config(["seed=5"])
    assert config.name == "arithmetic.yaml"
    assert Path(os.environ["TRIREME_TASKSET_PATH"], "train.jsonl").exists()
    assert Path(os.environ["TRIREME_MODEL_PATH"], "config.json").exists()


def test_a_seed_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="seed is 'x'"):
        demo.demo_config(["seed=x"])


def test_the_example_is_the_packages_own_yaml() -> None:
    example = Path(__file__).parents[2] / "examples" / "grpo_arithmetic" / "arithmetic.yaml"
    assert example.read_text() == Path(demo.__file__).with_name("arithmetic.yaml").read_text()


def test_a_wrong_key_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="max_step is not a known key"):
        demo.demo_config(["max_step=5"])
    assert not list(tmp_path.iterdir())


def test_the_script_takes_its_seed_as_those_of_the_examples_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--seed", "3"])
    monkeypatch.delitem(sys.modules, "trireme.demo.prepare")
    runpy.run_module("trireme.demo.prepare", run_name="__main__")
    assert (tmp_path / "arithmetic_assets/seed_3/train.jsonl").exists()
