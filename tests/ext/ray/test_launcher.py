"""Ray as a launcher: what it says of a configuration, and whose GPUs count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.config.made import config_of, plan_of, values
from tests.config.test_placement import ENGINES, machine
from tests.ext.ray.clusters import named_by_file
from trireme.config import ConfigError
from trireme.config.gpus import Gpus
from trireme.launch.check import draft
from trireme.launch.models import pushed_part

__all__ = ["machine"]  # a fixture


def test_an_address_of_rays_client_is_a_problem(tmp_path):
    with pytest.raises(ConfigError, match="expected auto, or HOST:PORT"):
        plan_of(tmp_path, "cluster.ray_address=ray://head:10001")


def test_a_named_cluster_means_ray(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: None)
    assert plan_of(tmp_path, "cluster.ray_address=10.0.0.1:6379").places.launcher == "ray"


def test_engines_that_ray_has_started_keep_the_towers_of_their_folder(tmp_path):
    """A composite's pushes are its language model, but for the servers that a user has started."""
    spread = ("cluster.launcher=ray", "cluster.gpu_per_node=2")
    servers = "explorer.rollout_model.base_urls=[http://a:1]"
    backend = cast(Any, SimpleNamespace(towers={"visual.weight"}))
    plan = plan_of(tmp_path, *spread)
    opened = replace(plan, engine=replace(plan.engine, urls=("http://10.0.0.7:1",)))
    assert pushed_part(plan, backend) == pushed_part(opened, backend) == "text"
    for more in ((), spread):
        theirs = plan_of(tmp_path, *more, "explorer.rollout_model.engine_type=remote", servers)
        assert pushed_part(theirs, backend) == "merged"


def test_a_token_that_other_machines_lack_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: None)
    named = "cluster.ray_address=10.0.0.1:6379"

    def noted(*overrides):
        (plan,), _, _ = draft(config_of(tmp_path, values(tmp_path), *overrides))
        return [note for note in plan.notes if note.startswith("HF_TOKEN stays on this machine")]

    gated = "model.model_path=some/gated-model"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert not noted(named, gated)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    (said,) = noted(named, gated)
    assert "if some/gated-model is gated" in said and "hf_x" not in said
    assert not noted(named) and not noted(gated)  # a folder, and no other machine


def test_without_the_package_ray_is_a_problem_where_it_is_asked_for(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.ext.ray.launcher.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package ray is not installed"):
        plan_of(tmp_path, "cluster.launcher=ray")
    machine(4)
    assert plan_of(tmp_path, "cluster.gpu_per_node=4").places.launcher == "local"


EIGHT = Gpus(8, 80 * 2**30)
SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_the_gpus_are_those_of_the_cluster_and_not_of_the_commands_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: EIGHT)  # 0 here + 2 x 8
    asked = ("cluster.ray_address=10.0.0.1:6379", "cluster.node_num=2", "cluster.gpu_per_node=8")
    plan = plan_of(tmp_path, *asked, f"{ENGINES}=8")
    assert (plan.device, plan.dtype, plan.places.trainer_ranks) == ("cuda", "bfloat16", 8)
    assert plan.places.gpus == {"explorer": 8, "trainer": 8}


@pytest.mark.extension("memory")
@pytest.mark.parametrize(("memory", "planned"), [(80 * 2**30, False), (None, True)])
def test_a_named_cluster_has_a_memory_plan(tmp_path, monkeypatch, memory, planned):
    """By the size that its machines say, wherever the command is given, GPUs there or none; where
    they say none, activations are recomputed, and a note says so.
    """
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: Gpus(8, memory))
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: pytest.fail("it is elsewhere"))
    asked = ("cluster.ray_address=10.0.0.1:6379", "cluster.gpu_per_node=8")
    for here in (0, 2):
        monkeypatch.setattr("trireme.config.plan.num_gpus", lambda here=here: here)
        plan = plan_of(tmp_path, *asked, **SHAPE)
        assert plan.memory.gradient_checkpointing == planned
        assert any("GPUs is not known" in note for note in plan.notes) == planned
        assert plan.places.trainer_ranks == 7
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: Gpus(8, 2**30))
    with pytest.raises(ConfigError, match=r"trainer needs .* and a GPU has 1\.0 GiB"):
        plan_of(tmp_path, *asked, **SHAPE)


def test_a_cluster_that_does_not_answer_is_noted(tmp_path):
    plan = plan_of(tmp_path, "cluster.ray_address=127.0.0.1:1")
    assert plan.device == "cpu"
    assert any("counts no GPU, since the Ray cluster at 127.0.0.1:1" in n for n in plan.notes)


def test_a_cluster_that_was_killed_is_named_by_rays_file(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from trireme.ext.ray.cluster import cluster

    file = named_by_file(tmp_path, monkeypatch, "127.0.0.1:1")
    own = f"{file} names this cluster, and cluster.ray_address local starts one of the run's own"
    expected = f"does not answer.*; {own}, since this one may have been killed"
    with pytest.raises(TimeoutError, match=expected), cluster(plan_of(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379"),
        ("local", None),
        ("auto", "of the file"),
        ("", "of the file"),
    ],
)
def test_a_cluster_is_named_by_rays_variable_or_file(tmp_path, monkeypatch, variable, address):
    pytest.importorskip("ray")
    from trireme.ext.ray.cluster import address_of

    named_by_file(tmp_path, monkeypatch, "of the file")
    plan = plan_of(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert address_of(plan) == address
    for wrong in ("http://127.0.0.1:8265", "ray://10.0.0.1:10001"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        with pytest.raises(ValueError, match=f"RAY_ADDRESS is '{wrong}', and .* HOST:PORT"):
            address_of(plan)
        assert address_of(plan_of(tmp_path, "cluster.ray_address=local")) is None


def test_a_named_clusters_gpus_are_those_of_all_stages(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.ext.ray.cluster.gpus_of", lambda cluster: EIGHT)
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: pytest.fail("it is elsewhere"))
    stages = "stages=[{stage_name: a}, {stage_name: b, mode: bench}]"
    address = "cluster.ray_address=10.0.0.1:6379"
    plans, _, _ = draft(config_of(tmp_path, values(tmp_path), address, stages))
    assert [(plan.places.launcher, plan.device) for plan in plans] == [("ray", "cuda")] * 2
