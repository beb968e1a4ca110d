"""The experts that the embedded engine records are those that one fresh forward pass of
transformers' own model chooses for the same tokens, whatever way they went through the rows.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.engines.test_torch_engine import PROMPTS, run
from tests.hybrids import make_hybrid
from tests.mixtures import make_mixture, routers_of
from tests.tested import REPLAY, TESTED
from tests.tiny import loaded, make_model, make_tokenizer
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.routing import carry_routing
from trireme.engines.torch.shell import TorchSettings
from trireme.experience import Experience
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model

SOME = Sampling(max_tokens=15, n=3, ignore_eos=True)
UNKNOWN = 255


def chosen(folder: Path, ids: list[int]) -> np.ndarray:
    """[T, L, K] the sorted experts of all tokens, by transformers' own routers in one pass."""
    model = loaded(folder, attn_implementation="eager")
    each: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, inputs, out: each.append(out[-1]))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(each, 1).sort(-1)[0].numpy()


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", *TESTED[REPLAY]]
)
def test_recorded_experts_are_those_of_one_fresh_pass(family: str, tmp_path: Path) -> None:
    """Ragged company, replies of one prompt, rows that move, and prompts from the prefix cache."""
    folder = make_mixture(tmp_path / family, family)

    async def main(engine: TorchEngine) -> Any:
        short, long = Sampling(max_tokens=4, ignore_eos=True), SOME
        first = await asyncio.gather(
            *(
                engine.generate(p, short if i % 2 else long, key=(1, i, 0))
                for i, p in enumerate(PROMPTS)
            )
        )
        turns = [p + replies[0].ids + [6, 7, 8] for p, replies in zip(PROMPTS, first, strict=True)]
        cached = engine.health().cached_tokens
        second = await asyncio.gather(
            *(engine.generate(p, long, key=(2, i, 0)) for i, p in enumerate(turns))
        )
        assert engine.health().cached_tokens > cached
        return [*zip(PROMPTS, first, strict=True), *zip(turns, second, strict=True)]

    for prompt, replies in run(folder, main, max_rows=5, records_routing=True):
        for reply in replies:
            expected = chosen(folder, prompt + reply.ids)[:-1]
            assert reply.routed_experts.shape == expected.shape
            assert reply.routed_experts.dtype == np.uint8
            assert (np.sort(reply.routed_experts, -1) == expected).all()


def test_without_the_setting_nothing_is_recorded(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3_moe")

    async def main(engine: TorchEngine) -> Any:
        assert engine._decoder.store.routing(torch.device("cpu")) is None
        return await engine.generate(PROMPTS[0], SOME)

    assert [reply.routed_experts for reply in run(folder, main)] == [None] * 3


def test_more_experts_than_a_byte_has_numbers_for_take_two_bytes(tmp_path: Path) -> None:
    folder = make_hybrid(tmp_path, "lfm2_moe", num_experts=256, num_experts_per_tok=3)

    async def main(engine: TorchEngine) -> Any:
        return await engine.generate(PROMPTS[2], SOME)

    for reply in run(folder, main, records_routing=True):
        assert reply.routed_experts.dtype == np.int16
        expected = chosen(folder, PROMPTS[2] + reply.ids)[:-1]
        assert (np.sort(reply.routed_experts, -1) == expected).all()


def test_a_model_without_routers_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(ValueError, match="'qwen3' has no router that is known"):
        run(tiny_dir, lambda engine: None, records_routing=True)  # pyright: ignore


def test_a_router_that_chooses_otherwise_than_by_topk_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 90}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **sizes))
    with pytest.raises(ValueError, match="'phimoe' has no router that is known"):
        carry_routing(model)


def test_conversations_have_the_experts_of_one_fresh_pass(tmp_path: Path) -> None:
    """Turns, samples of one prompt that go on, a reply that is cut back and continued, and an edit
    that nothing follows.
    """
    folder = make_model(tmp_path, "qwen3_moe", layers=3)
    tokenizer = make_tokenizer()

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    async def go() -> dict[str, list[Experience]]:
        engine = TorchEngine(
            folder,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            device=Device(),
            settings=TorchSettings(max_model_len=400, records_routing=True),
        )
        sampling = Sampling(max_tokens=9, ignore_eos=True)

        def model() -> Model:
            return Model(engine, ChatTokens(tokenizer), sampling=sampling, max_model_len=400)

        out = {}
        turns = model()
        chat = [user("one")]
        for text in ("two", "three", "four"):
            chat += [(await turns.chat(chat)).message, user(text)]
        out["turns"] = turns.experiences(reward=1.0)
        blocking = turns.blocking(asyncio.get_running_loop())
        out["turns as messages"] = [blocking.convert_messages_to_experience(chat)]
        out["turns, per call"] = turns.experiences(reward=1.0, per_call=True)
        calls = [*turns.recorder]
        sizes = [len(call.inserted) + len(call.completion.ids) for call in calls]
        recorded = [call.completion.routed_experts for call in calls]
        assert [len(r) for r in recorded if r is not None] == [sizes[0] - 1, *sizes[1:]]
        fork = model()
        for reply in await fork.chat_samples([user("one")], n=3):
            await fork.chat([user("one"), reply.message, user("go on")])
        out["fork"] = fork.experiences(reward=1.0)
        edited = model()
        reply = await edited.chat([user("one")])
        edited.edit_reply([user("one")], reply.text[:4] + " but")
        out["edit at the end"] = edited.experiences(reward=1.0)
        message = {"role": "assistant", "content": reply.text[:4] + " but"}
        await edited.chat([user("one"), message, user("go on")])
        out["edit"] = edited.experiences(reward=1.0)
        await engine.close()
        return out

    made = asyncio.run(go())
    assert [len(each) for each in made.values()] == [1, 1, 3, 3, 1, 1]
    for name, each in made.items():
        for e in each:
            assert e.routed_experts is not None, name
            routing, expected = e.routed_experts.numpy(), chosen(folder, e.tokens.tolist())
            known = (routing != UNKNOWN).all((1, 2))
            assert (np.sort(routing[known], -1) == expected[known]).all(), name
            # no pass computed the last sampled token, and text after it that nothing followed
            end = int(e.mask.nonzero()[-1])
            assert known[:end].all() and not known[end:].any(), name
            assert (end < len(known) - 1) == (name in ("edit at the end", "turns as messages"))


@pytest.mark.parametrize("keeps", [False, True])
def test_an_update_in_flight_records_anew_what_is_computed_anew(
    keeps: bool, tmp_path: Path
) -> None:
    old, new = (make_model(tmp_path / str(n), "qwen3_moe", layers=3, seed=n) for n in (0, 1))
    weights = AutoModelForCausalLM.from_pretrained(new).state_dict()

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=120, ignore_eos=True)
        going = asyncio.ensure_future(engine.generate(PROMPTS[2], sampling))
        while engine.health().generated_tokens < 5:
            await asyncio.sleep(0)
        await engine.update_weights(weights, 1)
        return await going

    [reply] = run(old, main, records_routing=True, keep_kv=keeps)
    first = len(PROMPTS[2]) + reply.versions.index(1) - 1  # the first token that new weights saw
    assert len(PROMPTS[2]) < first < len(PROMPTS[2]) + 119
    ids, recorded = PROMPTS[2] + reply.ids, np.sort(reply.routed_experts, -1)
    anew = (recorded == chosen(new, ids)[:-1]).all((1, 2))
    if keeps:
        assert (recorded[:first] == chosen(old, ids)[:first]).all()
        assert not anew[:first].all()
    else:
        assert anew.all()
