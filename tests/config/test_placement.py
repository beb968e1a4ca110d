"""Placement: who gets how many places, and which engine a stage gets."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.made import SEEDS, config_of, plan_of, values
from trireme.cli.check import check
from trireme.cli.run import run
from trireme.config import ConfigError, Findings, load_config
from trireme.config.memory import MemoryPlan
from trireme.config.plan import unmet
from trireme.launch.check import draft
from trireme.monitor.terminal import Terminal

ENGINES = "explorer.rollout_model.engine_num"


pytestmark = pytest.mark.usefixtures("spreads")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    def has(gpus):
        monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: gpus)

    has(0)
    return has


def test_the_alfworld_seed_splits_eight_gpus_into_halves(machine):
    machine(8)
    (plan,), problems, _ = draft(load_config(SEEDS / "alfworld.yaml"))
    assert not [p for p in problems if p.key.startswith("cluster")]
    places = plan.places
    assert (places.launcher, places.num_engines, places.engine_size) == ("ray", 2, 2)
    assert places.trainer_ranks == 4
    assert places.gpus == {"explorer": 4, "trainer": 4}


def test_without_gpus_the_seed_is_local_and_its_split_is_told():
    (plan,), _, _ = draft(load_config(SEEDS / "alfworld.yaml"))
    assert (plan.places.launcher, plan.places.trainer_ranks) == ("local", 1)
    assert any("4 for engines (2 x 2), 4 for the trainer" in note for note in plan.notes)


def test_ray_without_gpus_takes_cpu_processes(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.node_num=2", "cluster.gpu_per_node=2")
    plan = plan_of(tmp_path, *asked, f"{ENGINES}=2")
    places = plan.places
    assert (places.launcher, places.num_engines, places.trainer_ranks) == ("ray", 2, 2)
    assert places.gpus == {"explorer": 0, "trainer": 0}
    assert not plan.sync.share_tensors and not plan.deterministic


def test_an_algorithm_with_a_critic_takes_several_ranks_too(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.gpu_per_node=3", "algorithm.algorithm_type=ppo")
    assert plan_of(tmp_path, *asked).places.trainer_ranks == 2


def test_ray_without_numbers_takes_what_engines_and_one_rank_need(tmp_path):
    plan = plan_of(tmp_path, "cluster.launcher=ray", f"{ENGINES}=2")
    assert (plan.places.per_node, plan.places.trainer_ranks) == (3, 1)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.gpu_per_node=2", f"{ENGINES}=2"], "takes 2 of the cluster's 2 places"),
        (["cluster.gpu_per_node=8", f"{ENGINES}=9"], "takes 9 of the cluster's 8 places"),
        (
            ["cluster.node_num=2", "cluster.gpu_per_node=8", f"{ENGINES}=3"],
            "leaves 13 of the cluster's 16 places \\(2 x 8\\) for the trainer",
        ),
        (
            ["cluster.gpu_per_node=2", "explorer.rollout_model.tensor_parallel_size=4"],
            "has to fit on one machine, which has 2 places",
        ),
        (
            ["cluster.gpu_per_node=4", "trainer.ulysses_sequence_parallel_size=2"],
            "expected a divisor of the trainer's 3 places",
        ),
    ],
)
def test_what_cannot_be_split_is_said_with_its_numbers(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        plan_of(tmp_path, *overrides)


def test_more_gpus_than_the_machine_has_are_refused(tmp_path, machine):
    machine(2)
    with pytest.raises(ConfigError, match="is 4 and this machine has 2"):
        plan_of(tmp_path, "cluster.gpu_per_node=4")
    plan = plan_of(tmp_path, "cluster.gpu_per_node=4", "cluster.launcher=local")
    assert plan.places.launcher == "local"


def test_shards_are_a_divisor_of_the_trainers_places(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.gpu_per_node=5")
    plan_of(tmp_path, *asked, "trainer.fsdp_size=2")
    for size in (0, 3):
        text = f"trainer.fsdp_size is {size}: expected a divisor of the trainer's 4 places, or -1 "
        with pytest.raises(ConfigError, match=text):
            plan_of(tmp_path, *asked, f"trainer.fsdp_size={size}")


@pytest.mark.extension("verl")
def test_megatron_is_said_to_be_fsdp2(tmp_path):
    overrides = ("cluster.launcher=ray", "cluster.gpu_per_node=3")
    plan = plan_of(tmp_path, *overrides, "trainer.trainer_strategy=megatron")
    assert any(note.endswith("FSDP2 shards the model in its place") for note in plan.notes)


MODEL = "explorer.rollout_model"


@pytest.mark.extension("remote")
def test_an_engine_takes_its_tensor_pipeline_and_data_parallel_places(tmp_path, machine):
    machine(8)
    sizes = (f"{MODEL}.pipeline_parallel_size=2", f"{MODEL}.data_parallel_size=2")
    plan = plan_of(tmp_path, "cluster.gpu_per_node=8", f"{MODEL}.engine_type=remote", *URLS)
    assert (plan.places.num_engines, plan.places.trainer_ranks) == (0, 8)
    with pytest.raises(ConfigError, match=r"data_parallel_size \(2\) takes 8 of the cluster's 8"):
        plan_of(tmp_path, "cluster.gpu_per_node=8", f"{ENGINES}=2", *sizes)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 16: an engine has to fit"):
        plan_of(tmp_path, "cluster.gpu_per_node=8", f"{MODEL}.pipeline_parallel_size=16")


URLS = (f"{MODEL}.base_urls=[http://127.0.0.1:1]",)


@pytest.mark.extension("remote")
@pytest.mark.extension("sql")
def test_auxiliary_models_on_gpus_have_a_place_of_their_own(tmp_path, machine):
    machine(4)
    judge = f"explorer.auxiliary_models=[{{model_path: {values(tmp_path)['model']['model_path']}}}]"
    plan = plan_of(tmp_path, "cluster.gpu_per_node=4", f"{MODEL}.engine_type=torch", judge)
    assert (plan.places.num_engines, plan.places.auxiliary, plan.places.trainer_ranks) == (1, 1, 2)
    assert plan.places.gpus == {"explorer": 2, "trainer": 2}
    serves = plan_of(
        tmp_path, "mode=serve", "cluster.gpu_per_node=4", judge, "cluster.launcher=ray"
    )
    assert serves.places.auxiliary == 0  # an explorer's process would hold them
    machine(0)
    assert plan_of(tmp_path, "cluster.launcher=ray", judge).places.auxiliary == 0


@pytest.mark.extension("remote")
def test_torch_engines_are_no_more_than_there_are_gpus_beside_the_trainers(tmp_path, machine):
    machine(1)
    asked = ("cluster.launcher=local", f"{MODEL}.engine_type=torch", f"{ENGINES}=2")
    plan = plan_of(tmp_path, *asked)
    assert plan.engine.hosts == 0
    assert any("takes a GPU beside the trainer's, and this machine has 1" in n for n in plan.notes)
    machine(3)
    assert plan_of(tmp_path, *asked).engine.hosts == 2


def test_engines_in_processes_without_their_server_are_a_problem(tmp_path, monkeypatch):
    lacks = "needs the extension 'http', which is not here"
    monkeypatch.setattr("trireme.config.engine_kind.PROGRAMS", {})
    monkeypatch.setattr("trireme.config.engine_kind.missing", lambda kind, name: lacks)
    with pytest.raises(ConfigError, match=r"engine_num is 2: an engine in a process .*'http'"):
        plan_of(tmp_path, f"{MODEL}.engine_type=torch", f"{ENGINES}=2")


@pytest.mark.extension("remote")
def test_several_torch_engines_are_processes(tmp_path):
    torch = f"{MODEL}.engine_type=torch"
    found = plan_of(tmp_path, torch, f"{ENGINES}=2")
    assert (found.engine.kind, found.engine.hosts, found.sync.method) == ("torch", 2, "nccl")
    assert plan_of(tmp_path, f"{ENGINES}=2").engine.hosts == 0


def test_without_a_memory_planner_activations_are_computed_again_where_it_is_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("trireme.config.memory.MEMORY_PLANNERS", {})
    assert plan_of(tmp_path).memory == MemoryPlan({}, False)
    asked = plan_of(tmp_path, "trainer.enable_gradient_checkpointing=true")
    assert asked.memory.gradient_checkpointing


def test_of_two_memory_planners_the_first_counts_and_a_note_names_the_other(tmp_path, monkeypatch):
    def estimate(stage, places, request):
        return MemoryPlan({"weights": 5}, True), Findings()

    planners = {"estimate": estimate, "mine": estimate}
    monkeypatch.setattr("trireme.config.memory.MEMORY_PLANNERS", planners)
    plan = plan_of(tmp_path)
    assert plan.memory.needs == {"weights": 5}
    [note] = [note for note in plan.notes if "memory planner" in note]
    assert note.startswith("memory planner 'estimate': only this one is used, and 'mine' is not")


def test_strict_refuses_another_engine_or_device_than_the_yaml_asks_for(tmp_path: Path) -> None:
    def lacking(*overrides: str) -> list[str]:
        [plan] = draft(config_of(tmp_path, values(tmp_path), *overrides)).plans
        return [str(problem) for problem in unmet(plan)]

    assert lacking() == lacking("explorer.rollout_model.engine_type=torch") == []
    assert lacking("cluster.gpu_per_node=8") == [
        "cluster.gpu_per_node is 8, and --strict is given: torch can use no GPU here, and the run "
        "would be on the CPU"
    ]


@pytest.mark.extension("vllm")
def test_strict_says_why_an_engine_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIREME_VLLM_PYTHON", raising=False)
    name = "explorer.rollout_model.engine_type=vllm"
    [plan] = draft(config_of(tmp_path, values(tmp_path), name)).plans
    expected = (
        "explorer.rollout_model.engine_type is vllm, and --strict is given: the embedded torch "
        "engine generates in its place, since no Python with vLLM was named"
    )
    [problem] = unmet(plan)
    assert str(problem).startswith(expected)
    assert unmet(replace(plan, mode="train")) == []
    path = tmp_path / "config.yaml"
    assert run(path, [name], [], strict=True) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")
    out = io.StringIO()
    assert check(path, [name], Terminal(file=out, soft_wrap=True), strict=True) == 1
    assert f"problem: {expected}" in out.getvalue()


@pytest.mark.parametrize(
    ("gpus", "overrides", "runners"),
    [
        (0, ("buffer.batch_size=128",), 8),
        (1, ("buffer.batch_size=128", "algorithm.repeat_times=8"), 64),
        (1, ("buffer.batch_size=128", "algorithm.repeat_times=2"), 128),
        (1, ("buffer.batch_size=128", "algorithm.repeat_times=128"), 8),
        (1, ("buffer.batch_size=4", "algorithm.repeat_times=8"), 8),
        (1, ("buffer.batch_size=128", "explorer.runner_per_model=3"), 3),
        (8, ("buffer.batch_size=128", "cluster.gpu_per_node=8", f"{ENGINES}=4"), 4 * 32),
    ],
)
def test_on_gpus_runners_follow_from_the_tasks_of_a_step(
    gpus, overrides, runners, tmp_path, machine
):
    machine(gpus)
    given = (*overrides, "buffer.total_epochs=9")
    assert plan_of(tmp_path, *given).engine.runners == runners
