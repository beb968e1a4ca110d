"""Which engine a stage gets: what `check` says of vLLM, of several engines and of one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.made import config_of, values
from trireme.config import Plan, draft_plans, engines, make_plans
from trireme.launch.engine_plan import engine_spec

FOUND = engines.Vllm("/envs/vllm/bin/python", "0.32.0", ("max_num_seqs", "block_size", "seed"))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_vllm", lambda asked: FOUND)


def plan(tmp_path: Path, *overrides: str, **facts: Any) -> Plan:
    return make_plans(config_of(tmp_path, tree(tmp_path, facts), *overrides))[0]


def problems(tmp_path: Path, *overrides: str, **facts: Any) -> list[str]:
    _, found = draft_plans(config_of(tmp_path, tree(tmp_path, facts), *overrides))
    return [str(problem) for problem in found]


def tree(tmp_path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose model's config.json has these facts."""
    out = values(tmp_path)
    file = Path(out["model"]["model_path"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return out


def key(name: str) -> str:
    return f"explorer.rollout_model.{name}"


VLLM = f"{key('engine_type')}=vllm"


@pytest.mark.usefixtures("vllm")
def test_vllm_generates_where_it_is_found_and_check_says_which(tmp_path: Path) -> None:
    found = plan(tmp_path, VLLM, f"{key('engine_num')}=2", head_dim=64)
    assert (found.engine_kind, found.engine_python, found.engine_hosts) == ("vllm", FOUND.python, 2)
    assert (found.sync_method, found.share_tensors, found.deterministic) == ("nccl", False, False)
    assert f"{VLLM.replace('=', ' (')}): vLLM 0.32.0 of {FOUND.python}" in found.notes
    method = "synchronizer.sync_method=memory"
    assert plan(tmp_path, VLLM, method, head_dim=64).sync_method == "memory"


def test_without_vllm_the_embedded_engine_generates_and_a_note_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    found = plan(tmp_path, VLLM)
    assert (found.engine_kind, found.engine_hosts) == ("torch", 0)
    assert any("generates in its place, since no Python with vLLM was" in n for n in found.notes)


def test_without_vllm_a_gpu_is_not_left_to_the_embedded_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    monkeypatch.setattr("trireme.config.derive.num_gpus", lambda: 2)
    (said,) = problems(tmp_path, VLLM)
    assert said.startswith(f"{key('engine_type')} is vllm, and no Python with vLLM was found")
    assert "pip install vllm" in said and engines.VARIABLE in said


def test_a_python_without_vllm_is_a_problem_where_it_is_named(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, VLLM, f"{key('engine_python')}={sys.executable}")
    assert said.startswith(f"{key('engine_python')} is '{sys.executable}': expected a Python that")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("override", "facts", "said"),
    [
        ("tensor_parallel_size=3", {"num_attention_heads": 4}, "is 3: expected a divisor of the m"),
        ("extra_engine_args.max_num_seq=4", {}, "engine: did you mean max_num_seqs?"),
        ("extra_engine_args.seed=4", {}, f"what sets it is {key('seed')}"),
        ("tool_call_parser=mistral", {}, "expected hermes"),
    ],
)
def test_what_vllm_cannot_do_is_found_before_it_starts(
    tmp_path: Path, override: str, facts: dict[str, Any], said: str
) -> None:
    found = problems(tmp_path, VLLM, key(override), **{"head_dim": 64, **facts})
    assert len(found) == 1 and said in found[0]


@pytest.mark.usefixtures("vllm")
def test_heads_that_its_cpu_kernels_lack_are_named(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, VLLM, num_attention_heads=4, head_dim=8)
    assert "no attention on a CPU for heads of 8: expected 32, 64" in said


def test_several_torch_engines_are_processes(tmp_path: Path) -> None:
    found = plan(tmp_path, f"{key('engine_type')}=torch", f"{key('engine_num')}=2")
    assert (found.engine_kind, found.engine_hosts, found.sync_method) == ("torch", 2, "nccl")
    assert plan(tmp_path, f"{key('engine_num')}=2").engine_hosts == 0


def test_colocate_is_one_device_whose_engine_reads_the_trainers_weights(tmp_path: Path) -> None:
    found = plan(tmp_path, "mode=colocate", "synchronizer.sync_method=checkpoint")
    assert (found.mode, found.engine_hosts, found.sync_method) == ("both", 0, "memory")
    assert found.share_tensors and not found.takes_turns
    said = problems(tmp_path, "mode=colocate", f"{key('engine_num')}=2")
    assert said == [f"{key('engine_num')} is 2: expected 1 in mode colocate"]


@pytest.mark.usefixtures("vllm")
def test_vllm_in_colocate_takes_turns_with_the_trainer(tmp_path: Path) -> None:
    found = plan(tmp_path, "mode=colocate", VLLM, head_dim=64)
    assert (found.engine_hosts, found.sync_method, found.takes_turns) == (1, "memory", True)
    assert any("only pauses while the trainer works" in note for note in found.notes)
    options = engine_spec(found, "model").options
    assert (options["enable_sleep_mode"], options["gpu_memory_utilization"]) == (True, 0.25)
    apart = plan(
        tmp_path, "mode=colocate", VLLM, "synchronizer.sync_style=fully_async", head_dim=64
    )
    assert (apart.engine_hosts, apart.takes_turns) == (0, False)
    assert any("which needs sync_style fixed, sync_interval 1" in note for note in apart.notes)
    assert (
        "enable_sleep_mode" not in engine_spec(plan(tmp_path, VLLM, head_dim=64), "model").options
    )
