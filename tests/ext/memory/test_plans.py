"""What the memory plan decides and says of a stage: what is short, and what is computed again."""

from __future__ import annotations

import pytest

from scripts import memory_page
from tests.cli.test_check import printed
from tests.config.conftest import spreads as spreads
from tests.config.made import config_of, values, values_with
from tests.config.test_placement import ENGINES, MODEL
from tests.config.test_placement import machine as machine
from trireme.config.memory import GIB
from trireme.launch.check import draft

pytestmark = pytest.mark.usefixtures("spreads")


def four(tmp_path):
    return values_with(tmp_path, **FOUR)


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
    (said,) = [p for p in map(str, found.problems) if "missing" in p]
    assert said.startswith("trainer needs ") and "for each of 2 ranks" in said
    assert "a GPU has 80.0 GiB" in said and "GiB are missing" in said
    (plan,), _, _ = draft(config_of(tmp_path, values_with(tmp_path, **SEVEN), *given, tokens))
    assert plan.places.trainer_ranks == 7 and plan.memory.gradient_checkpointing
    assert sum(plan.memory.needs.values()) < 80 * 2**30
    (small,), _, _ = draft(config_of(tmp_path, values(tmp_path), *given))
    assert not small.memory.gradient_checkpointing
    asked = "trainer.enable_gradient_checkpointing=true"
    (small,), _, _ = draft(config_of(tmp_path, values(tmp_path), *given, asked))
    assert small.memory.gradient_checkpointing


def test_on_a_cpu_it_is_the_machines_memory_that_a_plan_has_to_fit_into(
    tmp_path, machine, monkeypatch
):
    machine(0)
    has: dict[str, int | None] = {"bytes": 64 * GIB}
    monkeypatch.setattr("trireme.machine.memory", lambda: has["bytes"])
    tokens = "trainer.max_token_len_per_gpu=4096"

    def drafted(*given):
        return draft(config_of(tmp_path, values_with(tmp_path, **SEVEN), tokens, *given))

    (said,) = [p for p in map(str, drafted().problems) if "missing" in p]
    assert said.startswith("trainer needs 149.4 GiB") and "GPU" not in said
    assert "of memory, and this machine or container has 64.0 GiB" in said
    assert "model.lora_configs or a smaller" in said
    ranks = drafted("cluster.launcher=ray", "cluster.gpu_per_node=3")
    (said,) = [note for note in ranks.plans[0].notes if "missing" in note]
    assert "for each of 2 ranks, and this machine or container has 32.0 GiB for each rank" in said
    noted = drafted("ignore_validator_suggestions=true")
    (plan,) = noted.plans
    assert not noted.problems and any("trainer needs 149.4 GiB" in note for note in plan.notes)
    assert plan.memory.gradient_checkpointing, "it is short of room for activations, too"
    has["bytes"] = sum(plan.memory.needs.values()) - GIB  # of a micro-batch, which is an estimate
    close = drafted()
    assert not close.problems and any("may be too high" in note for note in close.plans[0].notes)
    has["bytes"] = 64 * GIB
    for_gpus = drafted("cluster.gpu_per_node=8")  # checked where there are none
    assert not for_gpus.problems
    (said,) = [note for note in for_gpus.plans[0].notes if "missing" in note]
    assert said.endswith("; the GPUs of cluster.gpu_per_node are not here")
    for enough in (256 * GIB, None):  # activations are stored; without a size nothing is said
        has["bytes"] = enough
        found = drafted()
        (plan,) = found.plans
        assert not found.problems and not plan.memory.gradient_checkpointing
        assert plan.lengths.max_token_len == 4096
        assert not any("recomputed" in note for note in plan.notes)
    needed = sum(plan.memory.needs.values())
    has["bytes"] = needed - GIB
    found = drafted()
    (plan,) = found.plans
    assert not found.problems and plan.memory.gradient_checkpointing
    assert sum(plan.memory.needs.values()) < needed - GIB
    (said,) = [note for note in plan.notes if "recomputed" in note]
    assert "(trainer.enable_gradient_checkpointing)" in said
    assert f" do not fit into {(needed - GIB) / GIB:.1f} GiB" in said
    assert "compiled passes are not used" in said  # they went without a word
    asked = drafted("trainer.enable_gradient_checkpointing=true")
    assert not any("recomputed" in note for note in asked.plans[0].notes)


def test_memory_is_that_of_the_ranks_that_hold_the_model_together(tmp_path, machine):
    machine(8)
    given = ("cluster.gpu_per_node=8", f"{MODEL}.engine_type=torch")

    def memory(engines, shards):
        asked = (f"{ENGINES}={engines}", f"trainer.fsdp_size={shards}")
        (plan,), _, _ = draft(config_of(tmp_path, values_with(tmp_path, **SEVEN), *given, *asked))
        needs = dict(plan.memory.needs)
        groups.append(needs.pop("NCCL") / (GIB / 2))
        return needs

    groups: list[float] = []
    assert memory(4, 2) == memory(6, -1) != memory(4, -1) == memory(4, 4)
    # of the shards, of the copies where there are some, and with the engines
    assert groups == [3, 2, 2, 2]


FOUR = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "model_type": "qwen3", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.extension("remote")
def test_a_teacher_is_charged_where_it_lies_on_the_trainers_gpu(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 80 * 2**30)
    machine(1)

    def charged(*given):
        config = config_of(tmp_path, four(tmp_path), "cluster.launcher=local", *given)
        (plan,), _, _ = draft(config)
        return plan.memory.needs["auxiliary models"]

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
        needs = plan.memory.needs
        return plan.sync.share_tensors, needs["engine"], needs["engine's cache"] > 0

    weights = 4_022_468_096  # as the model's own parameters count
    # in bfloat16, of the trainer's float32; in lock-step a train step takes more than its cache
    assert engine() == (False, 2 * weights, False)
    late = "synchronizer.sync_style=fully_async"
    assert engine(late) == (False, 2 * weights, True)
    linear = 36 * 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)  # kept beside those with the adapter
    adapted = "model.lora_configs=[{name: a}]"
    merging = f"{MODEL}.enable_lora=false"
    assert engine(adapted, late, merging) == (False, 2 * (weights + linear), True)
    numbers = (
        36 * 32 * (4 * 2560 + 2 * 4096 + 2 * 1024 + 3 * (2560 + 9728))
    )  # over the base: a copy
    assert engine(adapted, late) == (False, 2 * numbers, True)
    merged = "model.lora_configs=[{name: a, use_dora: true}]"
    assert engine(merged, late) == (False, 2 * weights, True)
    by_files = ("model.lora_configs=[{name: a}]", "synchronizer.sync_method=offline")
    assert engine(*by_files) == (False, 2 * weights, True)
    machine(4)
    apart = (f"{MODEL}.engine_type=torch", f"{ENGINES}=2")
    assert engine(*apart) == (False, 0, False)
    data = tmp_path / "sft.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    store = f"buffer.trainer_input.experience_buffer.path={data}"
    assert engine("algorithm.algorithm_type=sft", store)[1:] == (0, False)


SEVEN_BIASED = SEVEN | {"model_type": "qwen2"}
RANK_16 = "model.lora_configs=[{lora_rank: 16}]"


@pytest.mark.parametrize(
    ("gib", "overrides", "fits"),
    [
        (24, (), True),
        (24, ("model.max_model_len=2048",), True),
        (24, ("synchronizer.sync_style=fully_async",), True),
        (24, (f"{MODEL}.enable_lora=false",), False),
        (24, ("model.lora_configs=[{lora_rank: 16, use_dora: true}]",), False),
        (24, ("synchronizer.sync_method=checkpoint",), False),
        (16, (), False),
    ],
)
def test_an_adapter_of_seven_billion_weights_fits_where_the_base_is_there_once(
    gib, overrides, fits, tmp_path, machine, monkeypatch
):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: gib * 2**30)
    machine(1)
    given = (RANK_16, "cluster.launcher=local", *overrides)
    (plan,), problems, _ = draft(config_of(tmp_path, values_with(tmp_path, **SEVEN_BIASED), *given))
    assert plan.dtype == "bfloat16" and plan.memory.needs["weights"] == 2 * 7_615_616_512
    needed = sum(plan.memory.needs.values())
    assert fits == (needed < gib * 2**30) == (not problems)
    if fits:
        assert plan.sync.share_base and plan.memory.gradient_checkpointing
        numbers = 28 * 16 * (4 * 3584 + 2 * 3584 + 2 * 512 + 3 * (3584 + 18944))
        assert plan.memory.needs["adapter"] == 16 * numbers
        assert plan.memory.needs["engine"] == 2 * numbers
    else:
        assert any("GiB are missing" in str(problem) for problem in problems)


@pytest.mark.parametrize("packs", [False, True])
def test_on_a_cpu_the_process_and_its_engine_are_charged(tmp_path, machine, monkeypatch, packs):
    machine(0)
    monkeypatch.setattr("trireme.machine.memory", lambda: None)  # whether it fits is another test's
    monkeypatch.setattr("trireme.engines.torch.linear.packs", lambda dtype: packs)

    def parts(*given):
        config = config_of(tmp_path, four(tmp_path), *given)
        (plan,), _, _ = draft(config)
        needs = plan.memory.needs
        return needs["engine"], needs["engine's cache"], needs["libraries"]

    # tensors are shared; keys, values and packed matrices are freed for a step
    assert parts() == (0, 0, 460 * 2**20)
    alone, cache, _ = parts("synchronizer.sync_style=fully_async")
    weights = 4 * 4_022_468_096
    assert alone == weights
    keys = cache - packs * weights  # the norms are not packed
    assert 2**15 * 2 * 4 * 1024 * 36 <= keys + 2**24 <= weights


def test_a_plan_that_does_not_fit_can_be_tried_all_the_same(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: 24 * 2**30)
    machine(1)
    config = config_of(tmp_path, four(tmp_path))
    (said,) = [str(p) for p in draft(config).problems]
    assert "ignore_validator_suggestions: true" in said and "trainer.offload" not in said
    config = config_of(tmp_path, four(tmp_path), "ignore_validator_suggestions=true")
    (plan,), found, _ = draft(config)
    assert not found and any("GiB are missing" in note for note in plan.notes)


def test_the_copy_that_saves_behind_is_asked_for_and_its_memory_is_noted(tmp_path, machine):
    machine(4)

    def noted(*given):
        config = config_of(tmp_path, four(tmp_path), *given)
        (plan,), _, _ = draft(config)
        return plan.places.trainer_ranks, [note for note in plan.notes if "save_behind" in note]

    here, behind = "cluster.launcher=local", "trainer.save_behind=true"
    assert noted(here) == (1, [])
    assert "copy takes 45.0 GiB of the CPU's memory" in noted(here, behind)[1][0]  # 12 a weight
    lora = "model.lora_configs=[{name: a}]"
    assert "copy takes 15.0 GiB" in noted(here, behind, lora)[1][0]
    ranks, (note,) = noted("cluster.gpu_per_node=4", behind, "trainer.offload=true")
    assert ranks > 1 and f"takes {4_022_468_096 * 12 / ranks / 2**30:.1f} GiB" in note
    assert note.endswith("in which trainer.offload keeps weights and moments already")


HALF = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gib", "shape", "overrides", "tokens"),
    [
        (None, HALF, (), 1024),
        (80, HALF, (), 32768),
        (48, HALF, (), 16384),  # more would have to be computed again
        (24, HALF, (), 1024),
        (24, HALF, ("trainer.enable_gradient_checkpointing=true",), 32768),
        (80, HALF, ("trainer.max_token_len_per_gpu=2000",), 2000),
        (80, HALF, ("model.max_model_len=20000",), 40000),
        (80, SEVEN, ("ignore_validator_suggestions=true",), 1024),  # it does not fit anyway
    ],
)
def test_a_micro_batch_on_a_gpu_is_as_large_as_the_plan_has_room_for(
    gib, shape, overrides, tokens, tmp_path, machine, monkeypatch
):
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: gib and gib * 2**30)
    machine(1)
    (plan,), found, _ = draft(config_of(tmp_path, values_with(tmp_path, **shape), *overrides))
    assert not found
    assert plan.lengths.max_token_len == tokens
    if gib and shape is HALF:
        needed = sum(plan.memory.needs.values()) / (gib * 2**30)
        assert needed <= (0.9 if 2**14 <= tokens <= 2**15 else 1)


@pytest.mark.parametrize("asked", [None, True, False])
def test_where_the_gpu_is_not_known_activations_are_computed_again_unless_asked(
    asked, tmp_path, machine, monkeypatch
):
    """Else the first train step of a large model ends for lack of memory."""
    monkeypatch.setattr("trireme.config.plan.gpu_bytes", lambda: None)
    machine(1)
    key = "trainer.enable_gradient_checkpointing"
    given = () if asked is None else (f"{key}={str(asked).lower()}",)
    (plan,), _, _ = draft(config_of(tmp_path, four(tmp_path), *given))
    assert plan.memory.needs and plan.memory.gradient_checkpointing == (asked is not False)
    (said,) = [note for note in plan.notes if "the memory of its GPUs is not known" in note]
    assert ("and activations are recomputed" in said) == (asked is None) and key in said


def test_the_memory_of_a_model_that_can_be_reckoned_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.machine.memory", lambda: None)
    config_of(tmp_path, values_with(tmp_path, **SEVEN))
    code, text = printed(tmp_path / "config.yaml")
    assert code == 0
    assert "memory        " in text and " each trainer " in text
    assert "in its turn" not in text


def test_a_mixture_that_the_memory_plan_does_not_know_is_named(tmp_path):
    facts = {"model_type": "deepseek_v3", "n_routed_experts": 64, "num_experts_per_tok": 6}
    config_of(tmp_path, values_with(tmp_path, **(SEVEN | facts)))
    code, text = printed(tmp_path / "config.yaml")
    assert code == 0 and "memory        " not in text
    assert "note: model.model_path: there is no memory plan and no MFU for this kind " in text
    assert "(deepseek_v3, a mixture of experts)" in text


def test_the_page_has_the_plans_table():
    page = memory_page.PAGE.read_text(encoding="utf-8")
    assert page == memory_page.document(), "run: python scripts/memory_page.py"
