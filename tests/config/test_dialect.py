"""Dialects: each is asked about keys, options and classes, and a missing one is named."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.config.made import values
from trireme import extensions
from trireme.algorithms.recipes import row_of
from trireme.cli.arguments import Given, Source, WithFlags, yaml_and_keys
from trireme.config import ConfigError
from trireme.config.dialect import Dialect, dialects
from trireme.config.load import read_config
from trireme.config.section import Fate, Moved, NoEffect
from trireme.config.stages import check_fates, stages_of
from trireme.launch.check import examine
from trireme.registry import ALGORITHMS, DIALECTS, FLAGS, POLICY_LOSSES
from trireme.workflows.plugins import load_plugins


class Mean:
    """A loss of a made-up system."""


class Klingon(Dialect):
    """A made-up system's dialect."""

    def keys(self, values: dict[str, Any]) -> Sequence[str]:
        return ["qapla is not read"] if values.pop("qapla", None) else []

    def options(self, key: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any, Fate]]:
        if key.endswith("policy_loss_fn_args") and "batleth" in values:
            yield "batleth", values["batleth"], NoEffect()
        if key.endswith("kl_loss_fn_args") and "clip" in values:
            yield "clip", values["clip"], Moved(to="trainer.grad_clip", gives_way=True)

    def adapt(self, kind: str, name: str, thing: Any) -> Any:
        if kind == "algorithm_type" and thing is Mean:
            return ALGORITHMS.get("grpo")
        return POLICY_LOSSES.get("ppo") if thing is Mean else None

    def stand_in(self) -> None:
        module = ModuleType("klingon")
        module.__loader__ = SimpleNamespace(explain=lambda error: f" (no {error.name} here)")  # type: ignore[assignment]
        sys.modules["klingon"] = module


class Broken(Dialect):
    """One that cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    DIALECTS["klingon"] = Klingon
    yield
    del DIALECTS["klingon"]
    sys.modules.pop("klingon", None)


def written(tmp_path: Path, **more: Any) -> Path:
    file = tmp_path / "run.yaml"
    made = values(tmp_path)
    for key, value in more.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump(made))
    return file


@pytest.mark.usefixtures("known")
def test_a_dialect_takes_keys_out_and_says_what_becomes_of_options(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        qapla=True,
        algorithm={
            "policy_loss_fn_args": {"batleth": 1, "clip_range": 0.3},
            "kl_loss_fn": "k2",
            "kl_loss_fn_args": {"clip": 0.25},
        },
    )
    drafted = examine(file)
    assert [str(problem) for problem in drafted.problems] == []
    config = drafted.plans[0].config
    assert config.trainer.grad_clip == 0.25
    notes = drafted.plans[0].notes
    assert "qapla is not read" in notes
    assert any("algorithm.policy_loss_fn_args.batleth=1" in note for note in notes)
    clip = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"clip": 0.25}}
    file = written(tmp_path, trainer={"grad_clip": 1.0}, algorithm=clip)
    config, problems = read_config(file)
    assert not problems and config.trainer.grad_clip == 1.0


@pytest.mark.usefixtures("known")
def test_a_class_of_a_dialects_form_is_a_part_or_an_algorithm(tmp_path: Path) -> None:
    ALGORITHMS["mean"] = POLICY_LOSSES["mean"] = Mean
    try:
        assert row_of("mean").name == "grpo"
        file = written(tmp_path, algorithm={"policy_loss_fn": "mean"})
        assert examine(file).problems == []
    finally:
        del ALGORITHMS["mean"], POLICY_LOSSES["mean"]


@pytest.mark.usefixtures("known")
def test_what_plug_ins_import_is_there_before_them(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin_of_klingons.py"
    plugin.write_text("from klingon import bird_of_prey\n")
    with pytest.raises(ConfigError, match=r"cannot import name .*\(no klingon here\)"):
        load_plugins([plugin])


def test_a_dialect_that_cannot_be_made_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = len(dialects())
    DIALECTS["broken"] = Broken
    try:
        assert len(dialects()) == there
        assert "dialect 'broken' is left out: it cannot be used: no" in caplog.text
    finally:
        del DIALECTS["broken"]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with an extension `gone`, which is not here."""
    owners = {
        "key": dict.fromkeys(("pagh", "algorithm.policy_loss_fn_args.pagh"), "gone"),
        "dialect": {"kahless": "gone"},
        "flags": {"kahless": "gone"},
    }
    owners["key"]["trainer.callbacks"] = "gone"
    monkeypatch.setattr(extensions, "_owners", lambda: owners)


NEEDS = "needs the extension 'gone', which is not here: `trireme extensions` lists what is"


@pytest.mark.usefixtures("gone")
def test_keys_of_a_dialect_that_is_not_here_name_its_extension(tmp_path: Path) -> None:
    _, problems = read_config(written(tmp_path, pagh=1))
    assert [str(problem) for problem in problems] == [f"pagh {NEEDS}"]
    config, _ = read_config(written(tmp_path, trainer={"callbacks": ["nothing"]}))
    (problem,) = check_fates(stages_of(config)[0]).problems
    assert str(problem) == f"trainer.callbacks (['nothing']) {NEEDS}"
    file = written(tmp_path, algorithm={"policy_loss_fn_args": {"pagh": 1}})
    (problem,) = examine(file).problems
    assert str(problem) == f"algorithm.policy_loss_fn_args.pagh {NEEDS}"


@pytest.mark.usefixtures("gone")
def test_a_class_and_an_import_name_the_extension_that_is_not_here(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin_of_kahless.py"
    plugin.write_text("import kahless.blade\n")
    with pytest.raises(ConfigError) as raised:
        load_plugins([plugin])
    assert f"No module named 'kahless' (kahless {NEEDS})" in str(raised.value)


class Flags:
    """Flags of a made-up system."""

    about = "Klingon flags work too: --batleth"
    names = ("batleth",)
    idle = MappingProxyType({"qapla": "honour needs no flag"})
    several = ()
    switches = ()

    def instead(self, name: str) -> str | None:
        return "trainer.grad_clip" if name == "honour" else None

    def sets(self, name: str, key: str) -> bool:
        return key == "seed"

    def overrides(self, flags: Given, config: Source) -> list[str]:
        return [f"seed={flags['batleth'][0]}"] if "batleth" in flags else []


app = typer.Typer(rich_markup_mode=None)


@app.command(cls=WithFlags)
def fight(ctx: typer.Context) -> None:
    """Fight."""
    typer.echo(yaml_and_keys(None, ["name=kor"], ctx.obj)[1])


def said(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    return " ".join(result.output.split())


def test_flags_of_a_dialect_set_keys_and_are_listed_by_help() -> None:
    FLAGS["klingon"] = Flags
    try:
        assert said("--batleth", "7", "--qapla", "x") == "['seed=7', 'name=kor']"
        assert "Set trainer.grad_clip" in said("--honour", "1")
        assert "did you mean --batleth?" in said("--batlet", "1")
        assert "Klingon flags work too: --batleth" in said("--help")
    finally:
        del FLAGS["klingon"]


def test_flags_that_cannot_be_made_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FLAGS["broken"] = Broken
    try:
        assert "name=kor" in said()
        assert "dialect of flags 'broken' is left out: it cannot be used: no" in caplog.text
    finally:
        del FLAGS["broken"]


@pytest.mark.usefixtures("gone")
def test_an_unknown_flag_names_the_extension_that_is_not_here() -> None:
    sentence = "no such option: --qapla. Other systems' flags need an extension that is not here: "
    assert f"{sentence}gone" in said("--qapla", "1")
