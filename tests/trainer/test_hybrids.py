"""Hybrids: gradients of packed and prefix-shared training are those of separate rows, a state that
leaks is seen, and the engine decodes what transformers computes at once.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.test_torch_engine import run
from tests.hybrids import make_hybrid
from tests.tested import ENGINE, HYBRIDS, LORA, ONE_OF_EACH, RANKS, TRAINER, families
from tests.tiny import loaded
from tests.trainer.own_pass import in_float64, packed_gap
from tests.trainer.ranks import run as on_ranks
from tests.trainer.samples import backend_of, experiences, gap, gradients_of, move
from tests.trainer.test_composites import grpo
from tests.trainer.test_fsdp2 import two_ranks_learn_alike
from trireme.batch import flatten, of_tokens
from trireme.engines.engine import Sampling
from trireme.engines.torch import decoder as decoder_module
from trireme.engines.torch.prefix import PrefixCache
from trireme.engines.torch.recurrent import Call, States, _carried, count_states
from trireme.engines.torch.rows import SavedRow, SavedRows
from trireme.engines.torch.shell import load_shell
from trireme.trainer.lora import Lora
from trireme.trainer.model import load_model, prove_architecture
from trireme.trainer.nodes import NodeCall, Nodes
from trireme.trainer.ranks import RankSpec

ROWS = [list(range(5, 45)), [7, 7, 9], [8], list(range(30, 50))]
"""Prompts of several lengths, one of a single token."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_hybrid(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


def own_scores(folder: Path, row: list[int]) -> Tensor:
    """log p of each token after the first, by transformers' forward pass in float64."""
    model = loaded(folder, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def far(got: list[float], expected: Tensor) -> float:
    return float((torch.tensor(got, dtype=torch.float64) - expected).abs().max())


SINGLE = of_tokens([[5, 6, 7, 8], [5, 6, 9, 9], [5, 7, 11, 11], [5, 6, 7, 4], [5, 6, 9, 3]])
"""Rows with nodes of one token that others continue: modules work in place there."""


@pytest.mark.parametrize("family", families(TRAINER, HYBRIDS))
def test_packed_training_in_float64_is_that_of_separate_rows(
    folders: Callable[[str], Path], family: str
) -> None:
    """MiniMax keeps factors of its decay in float32."""
    folder, limit = folders(family), 1e-6 if family == "minimax" else 1e-12
    with in_float64(folder):
        assert packed_gap(folder, SINGLE, dtype=torch.float64) < limit
        batch = flatten(experiences())
        for share in (True, False):
            assert packed_gap(folder, batch, share=share, dtype=torch.float64) < limit


@pytest.mark.parametrize("again", [False, True], ids=["", "activations computed again"])
@pytest.mark.parametrize("family", families(TRAINER, HYBRIDS))
def test_packed_training_in_float32_differs_by_rounding(
    folders: Callable[[str], Path], family: str, again: bool
) -> None:
    for batch in (SINGLE, flatten(experiences())):
        assert packed_gap(folders(family), batch, again=again) < 1e-4


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("family", families(LORA, HYBRIDS))
def test_shared_is_unshared_with_gradients(
    folders: Callable[[str], Path], family: str, lora: Lora | None
) -> None:
    samples = experiences()
    scores, found = [], []
    for tokens, share in ((1, False), (999, True)):
        backend = backend_of(folders(family), lora=lora, max_token_len=tokens, share_prefix=share)
        move(backend)
        scores.append(backend.logprobs(flatten(samples)))
        found.append(gradients_of(backend, grpo(), samples)[0])
    assert float((scores[0] - scores[1]).abs().max()) < 1e-5
    assert found[0] and gap(found[1], found[0]) < 1e-4


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_activations_computed_again_give_the_same_gradients(
    folders: Callable[[str], Path], family: str
) -> None:
    found = []
    for again in (False, True):
        backend = backend_of(folders(family), max_token_len=999, gradient_checkpointing=again)
        found.append(gradients_of(backend, grpo(), experiences())[0])
    assert gap(found[1], found[0]) < 1e-6


def _one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What packing does without states: the flat tokens are one sequence."""

    def flat(trie: Any) -> Nodes:
        every = torch.arange(len(trie.depth))
        return Nodes((NodeCall(every[None], None, False),), every)

    monkeypatch.setattr(Nodes, "of", flat)


def _state_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_recurrent_state", "get_linear_cache"):
        monkeypatch.setattr(States, name, lambda *_, **__: None)


def _tail_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "get_conv_state", lambda *_, **__: None)


def _state_after_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued nodes get padding after their end, which their states then contain."""
    of = Nodes.of

    def padded(trie: Any) -> Nodes:
        nodes = of(trie)
        calls, moves, base = [], [], 0
        for call in nodes.calls:
            count, width = call.tokens.shape
            extra = 2 * call.continued
            rows = torch.arange(count)[:, None] * (width + extra) + torch.arange(width)
            moves.append(base + rows.reshape(-1))
            base += count * (width + extra)
            more = call.tokens[:, -1:].expand(-1, extra)
            calls.append(replace(call, tokens=torch.cat([call.tokens, more], 1)))
        return Nodes(tuple(calls), torch.cat(moves)[nodes.place])

    monkeypatch.setattr(Nodes, "of", padded)


LEAKS = {
    "samples are one sequence": (_one_sequence, ONE_OF_EACH),
    "a state is not passed on": (
        _state_forgotten,
        ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "minimax"),
    ),
    "a convolution's last inputs are not passed on": (
        _tail_forgotten,
        ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"),
    ),
    "a state contains padding": (_state_after_padding, ONE_OF_EACH),
}


@pytest.mark.parametrize(
    ("leak", "family"), [(leak, one) for leak, (_, families) in LEAKS.items() for one in families]
)
def test_a_leak_is_seen(
    folders: Callable[[str], Path], leak: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the proof when a model is loaded, and by the comparison above."""
    folder = folders(family)
    LEAKS[leak][0](monkeypatch)
    with pytest.raises(ValueError, match="packed attention gives log-probabilities that differ"):
        load_model(folder, device="cpu")
    monkeypatch.setattr("trireme.trainer.model._AGREEMENT", math.inf)
    assert packed_gap(folder, flatten(experiences())) > 1e-2


@pytest.mark.parametrize("family", families(ENGINE, HYBRIDS))
def test_trainer_and_engine_score_as_transformers_does(
    folders: Callable[[str], Path], family: str
) -> None:
    """Prompts of several lengths at once, two samples of each, then a turn that continues one: it
    begins with the states that were saved at that one's end.
    """
    folder = folders(family)

    async def ask(engine: Any) -> Any:
        asked = Sampling(max_tokens=12, n=2, ignore_eos=True)
        replies = await asyncio.gather(*(engine.generate(row, asked) for row in ROWS))
        before = engine.health().cached_tokens
        further = [*ROWS[0], *replies[0][0].ids, 9, 11]
        again = await engine.generate(further, replace(asked, n=1))
        assert engine.health().cached_tokens - before == len(further) - 3
        return await engine.logprobs(ROWS[:2]), [*zip(ROWS, replies, strict=True), (further, again)]

    scored, answered = run(folder, ask, max_model_len=128)
    trained = backend_of(folder).score(ROWS[:2])
    for row, engine, trainer in zip(ROWS[:2], scored, trained, strict=True):
        expected = own_scores(folder, row)
        assert far(engine[1:], expected) < 1e-4
        assert far(trainer[1:], expected) < 1e-4
    for row, pair in answered:
        assert far_of(folder, row, pair) < 1e-4


def far_of(folder: Path, row: list[int], replies: list[Any]) -> float:
    """The largest difference of replies' log-probabilities from transformers' own."""
    return max(
        far(one.logprobs, own_scores(folder, [*row, *one.ids])[len(row) - 1 :]) for one in replies
    )


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_prompt_that_leaves_a_saved_one_in_its_middle_begins_anew(
    folders: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is that of the saved row's end; one resumed in the middle would be seen."""
    folder = folders(family)
    other = [*ROWS[0][:33], 60, 61, 62]

    async def ask(engine: Any) -> Any:
        asked = Sampling(max_tokens=8, ignore_eos=True)
        await engine.generate(ROWS[0], asked)
        before = engine.health().cached_tokens
        [reply] = await engine.generate(other, asked)
        return reply, engine.health().cached_tokens - before

    reply, cached = run(folder, ask, max_model_len=128)
    assert not cached and far_of(folder, other, [reply]) < 1e-4
    find = PrefixCache.find
    monkeypatch.setattr(PrefixCache, "find", lambda self, ids, whole: find(self, ids))
    reply, cached = run(folder, ask, max_model_len=128)
    assert cached and far_of(folder, other, [reply]) > 1e-2


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_rows_that_come_and_go_have_states_of_their_own(
    folders: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of all lengths: a finished row's place is taken, and taken again by a new request;
    long prompts are read in pieces.
    """
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 16)
    folder = folders(family)
    prompts = [[n + 5] * (1 + 5 * n) + [9, n + 20] for n in range(7)]

    async def ask(engine: Any) -> Any:
        lengths = [3, 11, 1, 7, 2, 14, 5]
        return await asyncio.gather(
            *(
                engine.generate(row, Sampling(max_tokens=n, n=2, ignore_eos=True))
                for row, n in zip(prompts, lengths, strict=True)
            )
        )

    answered = run(folder, ask, max_model_len=128, max_rows=4)
    for row, pair in zip(prompts, answered, strict=True):
        assert far_of(folder, row, pair) < 1e-4


@pytest.mark.parametrize("keep", [False, True])
def test_states_belong_to_a_version_as_keys_and_values_do(
    folders: Callable[[str], Path], keep: bool
) -> None:
    """New weights in mid-reply: states are computed again, unless old keys and values stay."""
    folder = folders("qwen3_5_text")
    new = make_hybrid(folder.parent / f"other_{keep}", "qwen3_5_text", seed=1)
    weights = AutoModelForCausalLM.from_pretrained(new).state_dict()
    row = ROWS[3]

    async def ask(engine: Any) -> Any:
        asked = asyncio.create_task(engine.generate(row, Sampling(max_tokens=60, ignore_eos=True)))
        while engine.health().generated_tokens < 8:
            await asyncio.sleep(0)
        await engine.update_weights(weights, 1)
        return (await asked)[0]

    reply = run(folder, ask, max_model_len=128, keep_kv=keep)
    first = reply.versions.index(1)
    assert 0 < first < 60
    of_new = own_scores(new, [*row, *reply.ids])[len(row) - 1 :]
    gap_after = far(reply.logprobs[first:], of_new[first:])
    assert (gap_after > 1e-2) if keep else (gap_after < 1e-4)


@pytest.mark.large
@pytest.mark.parametrize("family", families(RANKS, HYBRIDS))
def test_ranks_learn_what_one_process_learns(family: str, tmp_path: Path) -> None:
    path = make_hybrid(tmp_path / "model", family)
    two_ranks_learn_alike(path, tmp_path / "ranks")


def test_an_engine_takes_the_weights_of_a_trained_hybrid(folders: Callable[[str], Path]) -> None:
    backend = backend_of(folders("qwen3_5_text"))
    move(backend)

    async def ask(engine: Any) -> Any:
        await engine.update_weights(backend.weights(), 1)
        return (await engine.logprobs([ROWS[0]]))[0]

    scored = run(folders("qwen3_5_text"), ask, max_model_len=64)
    [expected] = backend.score([ROWS[0]])
    assert max(abs(a - b) for a, b in zip(scored, expected, strict=True)) < 1e-4


def test_an_engine_over_the_trainers_tensors_decodes_with_them(
    folders: Callable[[str], Path],
) -> None:
    folder = folders("granitemoehybrid")
    model = load_model(folder, device="cpu")

    async def ask(engine: Any) -> Any:
        return await engine.generate(ROWS[3], Sampling(max_tokens=8, ignore_eos=True))

    replies = run(folder, ask, max_model_len=64, share_with=model)
    assert far_of(folder, ROWS[3], replies) < 1e-4


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_a_family_that_decodes_otherwise_than_it_reads_is_refused_by_the_engine(
    kind: str, tmp_path: Path
) -> None:
    """transformers bounds their time steps from below at once, but not token by token."""
    config = AutoConfig.for_model(
        kind, hidden_size=32, mamba_d_state=8, ssm_state_size=8, vocab_size=40, chunk_size=16,
        mamba_num_heads=8, n_mamba_heads=8, mamba_head_dim=8, mamba_ngroups=1, n_groups=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        num_hidden_layers=2, num_mem_blocks=1, mamba_expand=2,
        **({"hybrid_override_pattern": "M*"} if kind == "nemotron_h" else
           {"layers_block_type": ["mamba", "hybrid"]}),
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'{kind}': token by token its layers give"):
        load_shell(tmp_path, device="cpu", dtype="float32")


def test_layers_that_pass_no_carrier_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model(
        "jamba", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=40,
        intermediate_size=48, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=8, num_experts=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    for load in (load_model, lambda path, device: load_shell(path, device=device, dtype="float32")):
        with pytest.raises(ValueError, match=r"'jamba'.*called without one: not supported"):
            load(tmp_path, device="cpu")


def test_a_saved_state_counts_in_the_prefix_cache_as_tokens_do() -> None:
    """One layer's keys and values are 8 numbers a token, another's state is 160."""
    rows = SavedRows({0: torch.zeros(2, 1, 1, 32, 4)}, {1: {"conv0": torch.zeros(1, 160)}})
    assert rows.tokens == 52 and SavedRows(rows.layers, {}).tokens == 32
    saved = SavedRow(rows, 0, 32)
    ids = list(range(33))
    for room, found in ((51, 0), (52, 32)):
        cache = PrefixCache(room)
        cache.add(ids[:32], saved)
        assert cache.find(ids, whole=True)[1] == found


KERNELS = {
    "fla/ops/gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/ops/triton/ssd_combined": (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
    ),
    "mamba_ssm/ops/triton/selective_state_update": ("selective_state_update",),
}
"""What transformers takes of other packages, by their files."""


def packages(folder: Path) -> Path:
    """Packages whose kernels refuse what is not on a GPU, as Triton's do."""
    refusal = "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"
    for file, names in KERNELS.items():
        inner = folder / file
        inner.mkdir(parents=True)
        for parent in (inner, *inner.parents):
            if parent == folder:
                break
            (parent / "__init__.py").touch()
        each = (f"def {n}(*args, **options):\n    raise ValueError({refusal!r})\n" for n in names)
        (inner / "__init__.py").write_text("\n".join(each))
    return folder


def _begun_beside(_: RankSpec, packages: Path, folder: Path) -> list[int]:
    """Proofs on a CPU, as of a GPU's ranks and engine, and the counts of states."""
    sys.path.insert(0, str(packages))
    prove_architecture(folder)
    load_shell(folder, device="cpu", dtype="float32")
    model = load_model(folder, device="cpu")
    found: Any = vars(sys.modules[type(model).__module__])["causal_conv1d_fn"]
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        found.__wrapped__()  # the package's: transformers has found it
    return list(count_states(model))


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_other_packages_kernels_are_not_called_without_a_gpu(family: str, tmp_path: Path) -> None:
    """transformers calls them wherever their packages are installed: a run on GPUs, whose proofs
    are on a CPU, ended before its first step.
    """
    folder = make_hybrid(tmp_path / "model", family)
    made = packages(tmp_path / "packages")
    [counts] = on_ranks(_begun_beside, tmp_path / "ranks", made, folder, world=1)
    assert counts == list(count_states(load_model(folder, device="cpu")))


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_a_mixer_takes_its_cache_by_the_name_of_any_version(name: str) -> None:
    """transformers 5.24 renamed the two of 5.23; its models pass `cache=None` with any other."""
    names: dict[str, Any] = {"Tensor": Tensor}
    exec(
        f"def forward(self, hidden: Tensor, {name}=None, **_):\n"
        f"    total = hidden.sum(1)\n"
        f"    if (before := {name}.get_recurrent_state(0)) is not None:\n"
        f"        total = total + before\n"
        f"    {name}.update_recurrent_state(total, 0)\n"
        f"    return hidden + total[:, None]\n",
        names,
    )
    made = {
        "forward": names["forward"],
        "__module__": "transformers.models.made_up",
        "layer_idx": 0,
    }
    mixer = _carried(type("Mixer", (nn.Module,), made))()

    class TwoCalls:
        def carry(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
            first, state = call(hidden[:, :2], None)
            return torch.cat([first, call(hidden[:, 2:], state)[0]], 1)

    out = mixer(torch.tensor([[[1.0], [2.0], [4.0]]]), rows=TwoCalls(), cache=None)
    assert out.flatten().tolist() == [4.0, 5.0, 11.0]


def test_a_transformers_that_is_too_old_for_layers_with_a_state_is_named(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 takes none above 5.19: one environment for both has it."""
    installed = metadata.version
    versions = {"transformers": "5.19.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or installed(name))
    expected = "layers with a state, which need transformers 5.22 or later: 5.19.0 is installed"
    with pytest.raises(ValueError, match=expected):
        prove_architecture(folders("lfm2"))
    with pytest.raises(ValueError, match=expected):
        load_shell(folders("lfm2"), device="cpu", dtype="float32")
