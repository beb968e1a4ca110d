"""Placement: who gets how many places, and which engine a stage gets."""

from __future__ import annotations

import subprocess

import pytest

from scripts import memory_page
from tests.config.made import SEEDS, config_of, plan_of, values, values_with
from trireme.config import ConfigError, load_config
from trireme.config.plan import gpu_bytes
from trireme.launch.check import draft

ENGINES = "explorer.rollout_model.engine_num"


pytestmark = pytest.mark.usefixtures("spreads")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    def has(gpus):
        monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: gpus)

    has(0)
    return has


def four(tmp_path):
    return values_with(tmp_path, **FOUR)


def test_the_alfworld_seed_splits_eight_gpus_into_halves(machine):
    machine(8)
    (plan,), problems, _ = draft(load_config(SEEDS / "alfworld.yaml"))
    assert not [p for p in problems if p.key.startswith("cluster")]
    assert (plan.launcher, plan.num_engines, plan.engine_size, plan.trainer_ranks) == (
        "ray", 2, 2, 4,
    )  # fmt: skip
    assert plan.gpus == {"explorer": 4, "trainer": 4}


def test_without_gpus_the_seed_is_local_and_its_split_is_told():
    (plan,), _, _ = draft(load_config(SEEDS / "alfworld.yaml"))
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


def test_shards_are_a_divisor_of_the_trainers_places(tmp_path):
    asked = ("cluster.launcher=ray", "cluster.gpu_per_node=5")
    plan_of(tmp_path, *asked, "trainer.fsdp_size=2")
    for size in (0, 3):
        text = f"trainer.fsdp_size is {size}: expected a divisor of the trainer's 4 places, or -1 "
        with pytest.raises(ConfigError, match=text):
            plan_of(tmp_path, *asked, f"trainer.fsdp_size={size}")


def test_megatron_is_said_to_be_fsdp2(tmp_path):
    overrides = ("cluster.launcher=ray", "cluster.gpu_per_node=3")
    plan = plan_of(tmp_path, *overrides, "trainer.trainer_strategy=megatron")
    assert any(note.endswith("FSDP2 shards the model in its place") for note in plan.notes)


MODEL = "explorer.rollout_model"


def test_an_engine_takes_its_tensor_pipeline_and_data_parallel_places(tmp_path, machine):
    machine(8)
    sizes = (f"{MODEL}.pipeline_parallel_size=2", f"{MODEL}.data_parallel_size=2")
    plan = plan_of(tmp_path, "cluster.gpu_per_node=8", f"{MODEL}.engine_type=remote", *URLS)
    assert (plan.num_engines, plan.trainer_ranks) == (0, 8)
    with pytest.raises(ConfigError, match=r"data_parallel_size \(2\) takes 8 of the cluster's 8"):
        plan_of(tmp_path, "cluster.gpu_per_node=8", f"{ENGINES}=2", *sizes)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 16: an engine has to fit"):
        plan_of(tmp_path, "cluster.gpu_per_node=8", f"{MODEL}.pipeline_parallel_size=16")


SEVEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def test_a_plan_that_does_not_fit_is_refused_with_what_is_short(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 80 * 2**30)
    machine(8)
    given = ("cluster.gpu_per_node=8", f"{MODEL}.engine_type=torch")
    tokens = "trainer.max_token_len_per_gpu=16384"
    found = draft(
        config_of(tmp_path, values_with(tmp_path, **SEVEN), *given, tokens, f"{ENGINES}=6")
    )
    (said,) = [p for p in map(str, found.problems) if "short" in p]
    assert said.startswith("trainer needs ") and "for each of 2 ranks" in said
    assert "a GPU has 80.0 GiB" in said and "GiB are short" in said
    (plan,), _, _ = draft(config_of(tmp_path, values_with(tmp_path, **SEVEN), *given, tokens))
    assert plan.trainer_ranks == 7 and plan.gradient_checkpointing
    assert sum(plan.memory.values()) < 80 * 2**30
    (small,), _, _ = draft(config_of(tmp_path, values(tmp_path), *given))
    assert not small.gradient_checkpointing
    asked = "trainer.enable_gradient_checkpointing=true"
    (small,), _, _ = draft(config_of(tmp_path, values(tmp_path), *given, asked))
    assert small.gradient_checkpointing


def test_memory_is_that_of_the_ranks_that_hold_the_model_together(tmp_path, machine):
    machine(8)
    given = ("cluster.gpu_per_node=8", f"{MODEL}.engine_type=torch")

    def memory(engines, shards):
        asked = (f"{ENGINES}={engines}", f"trainer.fsdp_size={shards}")
        (plan,), _, _ = draft(config_of(tmp_path, values_with(tmp_path, **SEVEN), *given, *asked))
        return plan.memory

    assert memory(4, 2) == memory(6, -1) != memory(4, -1) == memory(4, 4)


FOUR = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "model_type": "qwen3", "tie_word_embeddings": True,
}  # fmt: skip


def test_a_teacher_is_charged_where_it_lies_on_the_trainers_gpu(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 80 * 2**30)
    machine(1)

    def charged(*given):
        config = config_of(tmp_path, four(tmp_path), "cluster.launcher=local", *given)
        (plan,), _, _ = draft(config)
        return plan.memory["auxiliary models"]

    key, model = "explorer.auxiliary_models", tmp_path / "model"
    weights = 4_022_468_096
    assert charged() == 0
    assert charged(f"{key}=[{{model_path: {model}}}]", "algorithm.teacher_kl_fn=k2") == 2 * weights
    served = f"{{model_path: {model}, engine_type: remote, base_urls: ['http://127.0.0.1:9']}}"
    assert charged(f"{key}=[{served}]", "algorithm.teacher_kl_fn=k2") == 0


def test_an_engine_is_charged_where_it_has_weights_on_the_trainers_gpu(
    tmp_path, machine, monkeypatch
):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 80 * 2**30)
    machine(1)

    def engine(*given):
        config = config_of(tmp_path, four(tmp_path), "cluster.launcher=local", *given)
        (plan,), _, _ = draft(config)
        return plan.share_tensors, plan.memory["engine"], plan.memory["engine's cache"] > 0

    weights = 4_022_468_096  # as the model's own parameters count
    assert engine() == (False, 2 * weights, True)  # in bfloat16, of the trainer's float32
    assert engine("synchronizer.sync_style=fully_async") == (False, 2 * weights, True)
    linear = 36 * 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)  # kept beside those with the adapter
    assert engine("model.lora_configs=[{name: a}]") == (False, 2 * (weights + linear), True)
    merged = "model.lora_configs=[{name: a, use_dora: true}]"
    assert engine(merged) == (False, 2 * weights, True)
    by_files = ("model.lora_configs=[{name: a}]", "synchronizer.sync_method=offline")
    assert engine(*by_files) == (False, 2 * weights, True)
    machine(4)
    apart = (f"{MODEL}.engine_type=torch", f"{ENGINES}=2")
    assert engine(*apart) == (False, 0, False)
    data = tmp_path / "sft.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    store = f"buffer.trainer_input.experience_buffer.path={data}"
    assert engine("algorithm.algorithm_type=sft", store)[1:] == (0, False)


def test_a_plan_that_does_not_fit_can_be_tried_all_the_same(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 24 * 2**30)
    machine(1)
    config = config_of(tmp_path, four(tmp_path))
    (said,) = [str(p) for p in draft(config).problems]
    assert "ignore_validator_suggestions: true" in said and "trainer.offload" not in said
    config = config_of(tmp_path, four(tmp_path), "ignore_validator_suggestions=true")
    (plan,), found, _ = draft(config)
    assert not found and any("GiB are short" in note for note in plan.notes)


def test_the_copy_that_saves_behind_is_asked_for_and_its_memory_is_noted(tmp_path, machine):
    machine(4)

    def noted(*given):
        config = config_of(tmp_path, four(tmp_path), *given)
        (plan,), _, _ = draft(config)
        return plan.trainer_ranks, [note for note in plan.notes if "save_behind" in note]

    here, behind = "cluster.launcher=local", "trainer.save_behind=true"
    assert noted(here) == (1, [])
    assert "copy takes 45.0 GiB of the CPU's memory" in noted(here, behind)[1][0]  # 12 a weight
    lora = "model.lora_configs=[{name: a}]"
    assert "copy takes 15.0 GiB" in noted(here, behind, lora)[1][0]
    ranks, (note,) = noted("cluster.gpu_per_node=4", behind, "trainer.offload=true")
    assert ranks > 1 and f"takes {4_022_468_096 * 12 / ranks / 2**30:.1f} GiB" in note
    assert note.endswith("in which trainer.offload keeps weights and moments already")


def test_where_the_gpu_is_not_known_nothing_is_computed_again_unasked(
    tmp_path, machine, monkeypatch
):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: None)
    machine(1)
    (plan,), _, _ = draft(config_of(tmp_path, four(tmp_path)))
    assert plan.memory and not plan.gradient_checkpointing


def test_of_the_gpus_the_smallest_that_is_visible_counts(monkeypatch):
    said = "0, GPU-aa11, 81559\n1, GPU-bb22, 24564\n2, GPU-cc33, 49140\n"
    answer = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_bytes() == 24564 * 2**20
    for visible, size in (("0", 81559), ("0,2", 49140), ("GPU-bb", 24564), ("2,GPU-aa11", 49140)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_bytes() == size * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-dd44")
    assert gpu_bytes() is None


def test_the_page_has_the_plans_table():
    page = memory_page.PAGE.read_text(encoding="utf-8")
    assert page == memory_page.document(), "run: python scripts/memory_page.py"


URLS = (f"{MODEL}.base_urls=[http://127.0.0.1:1]",)


@pytest.mark.extension("sql")
def test_auxiliary_models_on_gpus_have_a_place_of_their_own(tmp_path, machine):
    machine(4)
    judge = f"explorer.auxiliary_models=[{{model_path: {values(tmp_path)['model']['model_path']}}}]"
    plan = plan_of(tmp_path, "cluster.gpu_per_node=4", f"{MODEL}.engine_type=torch", judge)
    assert (plan.num_engines, plan.auxiliary_places, plan.trainer_ranks) == (1, 1, 2)
    assert plan.gpus == {"explorer": 2, "trainer": 2}
    serves = plan_of(
        tmp_path, "mode=serve", "cluster.gpu_per_node=4", judge, "cluster.launcher=ray"
    )
    assert serves.auxiliary_places == 0  # an explorer's process would hold them
    machine(0)
    assert plan_of(tmp_path, "cluster.launcher=ray", judge).auxiliary_places == 0


def test_torch_engines_are_no_more_than_there_are_gpus_beside_the_trainers(tmp_path, machine):
    machine(1)
    asked = ("cluster.launcher=local", f"{MODEL}.engine_type=torch", f"{ENGINES}=2")
    plan = plan_of(tmp_path, *asked)
    assert plan.engine_hosts == 0
    assert any("takes a GPU beside the trainer's, and this machine has 1" in n for n in plan.notes)
    machine(3)
    assert plan_of(tmp_path, *asked).engine_hosts == 2


def test_several_torch_engines_are_processes(tmp_path):
    torch = f"{MODEL}.engine_type=torch"
    found = plan_of(tmp_path, torch, f"{ENGINES}=2")
    assert (found.engine_kind, found.engine_hosts, found.sync_method) == ("torch", 2, "nccl")
    assert plan_of(tmp_path, f"{ENGINES}=2").engine_hosts == 0
