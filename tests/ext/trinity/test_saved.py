"""A configuration that Trinity-RFT saved, with all that it computed, is one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.config.made import values
from trireme.config.load import read_config
from trireme.launch.check import examine

pytestmark = pytest.mark.extension("ray", "verl", "vllm")  # the file has keys of these

SAVED = Path(__file__).with_name("trinity_saved.yaml")
"""Every field of its classes with its default; for a small run as far as that says more."""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = values(tmp_path)
    monkeypatch.setenv("TRINITY_MODEL_PATH", made["model"]["model_path"])
    monkeypatch.setenv("TRINITY_TASKSET_PATH", made["buffer"]["explorer_input"]["taskset"]["path"])
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "out"))
    return made


def saved(folder: Path, **more: Any) -> Path:
    """The file, with `more` laid over its keys."""
    tree = OmegaConf.load(SAVED)
    for key, value in more.items():
        OmegaConf.update(tree, key, value, force_add=True)
    OmegaConf.save(tree, folder / "saved.yaml")
    return folder / "saved.yaml"


def test_it_passes_check_and_one_note_names_what_is_not_read(
    base: dict[str, Any], tmp_path: Path
) -> None:
    report = examine(saved(tmp_path))
    assert [str(problem) for problem in report.problems] == []
    notes = [note for plan in report.plans for note in plan.notes]
    [note] = [note for note in notes if note.startswith("saved by Trinity-RFT: 48 keys")]
    assert "the file: checkpoint_job_dir; cluster: total_gpu_num, rollout_gpu_num" in note
    assert "buffer.explorer_input.tasksets[0]: index, is_eval" in note


def test_keys_of_stages_and_auxiliary_models_are_passed_over_too(
    base: dict[str, Any], tmp_path: Path
) -> None:
    tree = yaml.safe_load(SAVED.read_text(encoding="utf-8"))
    engine = tree["explorer"]["rollout_model"]
    judge = {**engine, "model_path": base["model"]["model_path"], "temperature": 0.3}
    stage = {"stage_name": "one", "explorer": {"runner_num": 4, "name": "explorer"}}
    path = saved(tmp_path, **{"explorer.auxiliary_models": [judge], "stages": [stage]})
    _, problems = read_config(path)
    assert [str(problem) for problem in problems] == []
    [plan] = examine(path).plans
    [note] = [note for note in plan.notes if note.startswith("saved by Trinity-RFT")]
    assert "explorer.auxiliary_models[0]: gpu_per_engine" in note and ", temperature" in note
    assert "stages[0].explorer: runner_num" in note


def test_what_is_misspelt_in_it_is_still_a_problem(base: dict[str, Any], tmp_path: Path) -> None:
    _, problems = read_config(saved(tmp_path, **{"cluster.node_nun": 1}))
    assert [str(p) for p in problems] == [
        "cluster.node_nun is not a known key; did you mean 'cluster.node_num'?"
    ]


def test_in_other_files_such_a_key_is_unknown(base: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.merge(base, {"cluster": {"total_gpu_num": 2}}), path)
    _, problems = read_config(path)
    assert [problem.key for problem in problems] == ["cluster.total_gpu_num"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("explorer.rollout_model.nnodes", 2, "expected 1"),
        ("explorer.rollout_model.enable_return_routed_experts", True, "is no mixture of experts"),
        ("explorer.rollout_model.trust_remote_code", True, "they are one, set either"),
        ("explorer.rollout_model.temperature", 0.5, "they are one, set either"),
        ("trainer.trainer_config_path", "verl.yaml", "under trainer.trainer_config"),
    ],
)
def test_what_would_change_the_run_is_refused(
    key: str, value: Any, says: str, base: dict[str, Any], tmp_path: Path
) -> None:
    [problem] = examine(saved(tmp_path, **{key: value})).problems
    assert problem.key == key and says in problem.text


def test_an_engine_on_one_machine_says_so_as_trinity_does(
    base: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    engine = {"nnodes": 1, "temperature": 0.5, "model_path": base["model"]["model_path"]}
    OmegaConf.save(OmegaConf.merge(base, {"explorer": {"rollout_model": engine}}), path)
    config, problems = read_config(path)
    assert problems == [] and config.model.temperature == 0.5
