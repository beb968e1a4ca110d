"""Configurations in Trinity-RFT's vocabulary pass `check`, each without an edit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.made import values
from trireme.config import Config
from trireme.config.load import read_config
from trireme.config.stages import stages_of
from trireme.launch.check import examine

pytestmark = pytest.mark.whole


def documents(corpus: Path) -> dict[str, str]:
    """Name -> text of each document of a file."""
    texts = corpus.read_text(encoding="utf-8").split("\n---\n")
    return {text.split("name: ", 1)[1].split("\n", 1)[0]: text for text in texts}


DOCUMENTS = documents(Path(__file__).with_name("trinity_corpus.yaml"))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GRPO run; the corpus finds model and data by the environment."""
    made = values(tmp_path)
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    expert = tmp_path / "expert.jsonl"
    expert.write_text(f"{json.dumps({'messages': turns})}\n" * 16)
    row = {"question": "1 + 1?", "answer": "2", "pass_a": 0.5, "pass_b": 0.25}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(f"{json.dumps(row)}\n" * 32)
    with sqlite3.connect(tmp_path / "tasks.db") as store:
        store.execute("create table tasks (question text, answer text)")
        store.executemany("insert into tasks values (?, ?)", [("1 + 1?", "2")] * 32)
    monkeypatch.setenv("TRINITY_MODEL_PATH", made["model"]["model_path"])
    monkeypatch.setenv("TRINITY_SFT_DATASET_PATH", str(expert))
    monkeypatch.setenv("TRINITY_TASKS_DB", f"sqlite:///{tmp_path / 'tasks.db'}")
    return made


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_passes_check(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.merge(base, OmegaConf.create(DOCUMENTS[name])), path)
    assert [str(problem) for problem in examine(path).problems] == []


def loaded(base: dict[str, Any], path: Path, text: str) -> tuple[Config, list[str]]:
    """A document laid over the base, and what is wrong with its keys."""
    OmegaConf.save(OmegaConf.merge(base, OmegaConf.create(text)), path)
    config, problems = read_config(path)
    return config, [str(problem) for problem in problems]


def test_older_names_have_effect(base: dict[str, Any], tmp_path: Path) -> None:
    config, _ = loaded(base, tmp_path / "run.yaml", DOCUMENTS["lengths_of_the_engine"])
    assert (config.model.max_prompt_tokens, config.model.max_model_len) == (128, 192)
    assert not config.model.enable_prompt_truncation
    config, _ = loaded(base, tmp_path / "run.yaml", DOCUMENTS["stages_with_older_keys"])
    assert [stage.config.trainer.grad_clip for stage in stages_of(config)] == [2.0, 1.0]


def test_two_names_of_one_key_that_differ_are_a_problem(
    base: dict[str, Any], tmp_path: Path
) -> None:
    text = "{algorithm: {optimizer: {clip_grad: 2.0}}, trainer: {grad_clip: 0.5}}"
    _, problems = loaded(base, tmp_path / "run.yaml", text)
    assert problems == [
        "algorithm.optimizer.clip_grad is 2.0 and trainer.grad_clip 0.5: they are one, set either"
    ]


def test_a_section_of_a_service_that_is_not_started_is_named(
    base: dict[str, Any], tmp_path: Path
) -> None:
    loaded(base, tmp_path / "run.yaml", "{service: {data_juicer: {auto_start: true}}}")
    report = examine(tmp_path / "run.yaml")
    notes = [note for plan in report.plans for note in plan.notes]
    said = "service.data_juicer ({'auto_start': True}): the operator data_juicer starts a process"
    assert not report.problems and any(note.startswith(said) for note in notes)
