"""Who gets how many of the cluster's places, and what cannot be split."""

import pytest

from tests.config.made import SEEDS, config_of, values
from trireme.config import ConfigError, draft_plans, load_config, make_plans

ENGINES = "explorer.rollout_model.engine_num"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    def has(gpus):
        monkeypatch.setattr("trireme.config.derive.num_gpus", lambda: gpus)

    has(0)
    return has


def plan_of(tmp_path, *overrides):
    return make_plans(config_of(tmp_path, values(tmp_path), *overrides))[0]


def test_the_alfworld_seed_splits_eight_gpus_into_halves(machine):
    machine(8)
    (plan,), problems = draft_plans(load_config(SEEDS / "alfworld.yaml"))
    assert not [p for p in problems if p.key.startswith("cluster")]
    assert (plan.launcher, plan.num_engines, plan.engine_size, plan.trainer_ranks) == (
        "ray", 2, 2, 4,
    )  # fmt: skip
    assert plan.gpus == {"explorer": 4, "trainer": 4}


def test_without_gpus_the_seed_is_local_and_its_split_is_told():
    (plan,), _ = draft_plans(load_config(SEEDS / "alfworld.yaml"))
    assert (plan.launcher, plan.trainer_ranks) == ("local", 1)
    assert any("4 for engines (2 x 2), 4 for the trainer" in note for note in plan.notes)


def test_ray_without_gpus_takes_cpu_processes(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.node_num=2", "cluster.gpu_per_node=2")
    plan = plan_of(tmp_path, *asked, f"{ENGINES}=2")
    assert (plan.launcher, plan.num_engines, plan.trainer_ranks) == ("ray", 2, 2)
    assert plan.gpus == {"explorer": 0, "trainer": 0}
    assert not plan.share_tensors and not plan.deterministic


def test_an_algorithm_with_a_critic_takes_several_ranks_too(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.gpu_per_node=3", "algorithm.algorithm_type=ppo")
    assert plan_of(tmp_path, *asked).trainer_ranks == 2


def test_ray_without_numbers_takes_what_engines_and_one_rank_need(tmp_path):
    plan = plan_of(tmp_path, "cluster.launcher=ray", f"{ENGINES}=2")
    assert (plan.places_per_node, plan.trainer_ranks) == (3, 1)


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
        (["cluster.ray_address=ray://head:10001"], "expected auto, or HOST:PORT"),
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
    assert plan.launcher == "local"


def test_a_named_cluster_means_ray(tmp_path):
    assert plan_of(tmp_path, "cluster.ray_address=10.0.0.1:6379").launcher == "ray"


def test_modes_that_ray_does_not_know_stay_here(tmp_path):
    config = config_of(tmp_path, values(tmp_path), "cluster.launcher=ray", "mode=bench")
    (plan,), _ = draft_plans(config)
    assert plan.launcher == "local"
    assert any("mode bench runs in this process" in note for note in plan.notes)


def test_without_the_package_ray_is_a_problem_where_it_is_asked_for(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.places.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package ray is not installed"):
        plan_of(tmp_path, "cluster.launcher=ray")
    machine(4)
    assert plan_of(tmp_path, "cluster.gpu_per_node=4").launcher == "local"


def test_megatron_is_said_to_be_fsdp2(tmp_path):
    overrides = ("cluster.launcher=ray", "cluster.gpu_per_node=3")
    plan = plan_of(tmp_path, *overrides, "trainer.trainer_strategy=megatron")
    assert any(note.endswith("FSDP2 shards the model in its place") for note in plan.notes)
