"""Pictures are computed exactly: packed is separate, shared is unshared, the engine samples what
the trainer computes, and all of it is what transformers' whole model says.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.engines.test_torch_engine import run
from tests.ext.images.seeing import SEEING, make_seeing, picture, reader_for
from tests.tiny import loaded
from tests.trainer.samples import backend_of, gap, gradients_of, move
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten, of_tokens
from trireme.config.schema import AlgorithmConfig
from trireme.engines.engine import Sampling
from trireme.engines.torch import decoder as decoder_module
from trireme.engines.torch.vision import vision_of
from trireme.experience import EID, Experience
from trireme.pictures import BEGIN, Picture
from trireme.trainer.lora import Lora
from trireme.trainer.pack import pack, packed_tokens

_TOWERS = ("visual", "vision_tower", "multi_modal_projector")


@pytest.fixture(scope="module", params=SEEING)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp(request.param), request.param)


def rounds_more(folder: Path) -> bool:
    """Layers with a state, see tests/trainer/test_hybrids.py."""
    return "qwen3_5" in str(folder)


def pictures_of(folder: Path) -> tuple[Picture, Picture, Picture]:
    """Two of one size, and a larger one."""
    reader = reader_for(folder)
    big = reader.read(picture("green", (120, 150)))
    return reader.read(picture("red")), reader.read(picture("blue")), big


def samples(folder: Path) -> list[Experience]:
    """Rollouts of a prompt with a picture, the same text under another picture of its size, turns
    that show further ones, and one without any.
    """
    red, blue, big = pictures_of(folder)
    rng = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 90, (n,), generator=rng).tolist()

    before, after, reply = ids(4), ids(5), ids(6)
    prompts = [[*before, *one.ids, *after] for one in (red, blue)]
    turns = [*prompts[0], *reply, *ids(2), *big.ids, *ids(3), *red.ids, *ids(2)]
    rows = [
        *((0, run, prompts[0], reply[:3] + ids(4)) for run in range(3)),
        (1, 0, prompts[1], reply[:3] + ids(4)),
        (2, 0, turns, ids(7)),
        (2, 1, turns, ids(3)),
        (3, 0, ids(12), ids(9)),
    ]
    return [
        Experience(
            prompt + answer,
            prompt_length=len(prompt),
            logprobs=-4.5 + torch.randn(len(answer), generator=rng) * 0.3,
            versions=[0] * len(answer),
            advantages=torch.randn(len(answer), generator=rng),
            eid=EID(0, task, run_),
            pictures=[one for one in (red, blue, big) if one.first in {*prompt}],
        )
        for task, run_, prompt, answer in rows
    ]


def own_scores(
    folder: Path, row: list[int], pictures: dict[int, Picture], model: Any = None
) -> Tensor:
    """log p of a row's tokens after the first, by transformers' whole model; with gradients if it
    is given.
    """
    learns = model is not None
    model = model or loaded(folder, AutoModelForImageTextToText)
    pad, reader = model.config.image_token_id, reader_for(folder)
    shown = [pictures[token] for token in row if token in pictures]
    plain = torch.tensor([[pad if token >= BEGIN else token for token in row]])
    seen: Any = {}
    if shown and "gemma3" in str(folder):
        seen["pixel_values"] = torch.cat([reader.pixels(each) for each in shown])
        seen["token_type_ids"] = (plain == pad).int()
    elif shown:
        seen["pixel_values"] = torch.cat([reader.pixels(each) for each in shown])
        seen["image_grid_thw"] = torch.tensor([each.grid for each in shown])
        seen["mm_token_type_ids"] = (plain == pad).int()
    with torch.set_grad_enabled(learns):
        logits = model(input_ids=plain, **seen).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, plain[0, 1:, None])[:, 0]


def known(experiences: list[Experience]) -> dict[int, Picture]:
    return {each.first: each for e in experiences for each in e.pictures}


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_packed_and_shared_is_single_with_gradients(folder: Path, lora: Lora | None) -> None:
    recipe: Any = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    scores, gradients = [], []
    for tokens, share in ((1, False), (999, True)):
        backend = backend_of(folder, lora=lora, max_token_len=tokens, share_prefix=share)
        move(backend)
        scores.append(backend.logprobs(flatten(samples(folder))))
        gradients.append(gradients_of(backend, recipe, samples(folder))[0])
    assert float((scores[0] - scores[1]).abs().max()) < (3e-5 if rounds_more(folder) else 1e-5)
    assert gap(gradients[1], gradients[0]) < (1e-4 if rounds_more(folder) else 1e-5)
    assert gradients[0] and not any(part in n for part in _TOWERS for n in gradients[0])


def test_the_trainer_scores_as_transformers_does(folder: Path) -> None:
    rows = samples(folder)
    batch = of_tokens([e.tokens.tolist() for e in rows], pictures=[*known(rows).values()])
    scored = backend_of(folder, max_token_len=999).logprobs(batch).split(batch.counts.tolist())
    for e, got in zip(rows, scored, strict=True):
        row = e.tokens.tolist()
        text = torch.tensor([token < BEGIN for token in row[1:]])
        assert float((own_scores(folder, row, known(rows))[text] - got).abs().max()) < 1e-5


def test_pictures_of_one_size_under_one_text_are_not_one(folder: Path) -> None:
    first, _, _, other, *_ = samples(folder)
    prompts = [
        Experience([*e.tokens.tolist()[: e.prompt_length], 5, 6], prompt_length=e.prompt_length,
                   pictures=e.pictures)
        for e in (first, other)
    ]  # fmt: skip
    batch = flatten(prompts)
    begin = first.tokens.tolist().index(first.pictures[0].first)
    whole = sum(len(e.tokens) - 1 for e in prompts)
    assert packed_tokens(batch) == whole - begin  # what is before them is shared, and no more
    scored = backend_of(folder, max_token_len=999).logprobs(batch).view(2, 2)
    assert float((scored[0] - scored[1]).abs().max()) > 1e-3


def test_the_engine_samples_what_transformers_computes(folder: Path) -> None:
    rows = samples(folder)
    prompts = [e.tokens.tolist()[: e.prompt_length] for e in rows if e.eid.run == 0]
    seen = [e.pictures for e in rows if e.eid.run == 0]
    asked = Sampling(max_tokens=9, n=2, ignore_eos=True)

    async def ask(engine: Any) -> Any:
        replies = await asyncio.gather(
            *(engine.generate(p, asked, pictures=s) for p, s in zip(prompts, seen, strict=True))
        )
        # a further turn begins with what a row has left in the prefix cache
        longer = [*prompts[2], *replies[2][0].ids, *prompts[1]]
        again = await engine.generate(longer, asked, pictures=[*seen[1], *seen[2]])
        cached = engine.health().cached_tokens
        row = [*longer, *again[0].ids]
        scored = await engine.logprobs([row], pictures=[*seen[1], *seen[2]])
        return replies, (longer, again), cached, scored[0]

    replies, (longer, again), cached, scored = run(folder, ask, max_model_len=256)
    for prompt, pair in [*zip(prompts, replies, strict=True), (longer, again)]:
        for reply in pair:
            expected = own_scores(folder, [*prompt, *reply.ids], known(rows))[len(prompt) - 1 :]
            assert float((torch.tensor(reply.logprobs) - expected).abs().max()) < 1e-4
    assert cached >= len(prompts[2])
    text = [at for at, token in enumerate(longer) if at and token < BEGIN]
    expected = own_scores(folder, [*longer, *again[0].ids], known(rows))
    assert max(abs(scored[at] - float(expected[at - 1])) for at in text) < 1e-4
    assert all(scored[at] == 0.0 for at, token in enumerate(longer) if token >= BEGIN)


def test_a_prompt_that_is_read_in_pieces_is_seen_as_in_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that would end in the middle of a picture, which some models see whole."""
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 6)
    e = samples(folder)[4]
    row, asked = e.tokens.tolist(), Sampling(max_tokens=5, ignore_eos=True)

    async def ask(engine: Any) -> Any:
        reply = await engine.generate(row, asked, pictures=e.pictures)
        return reply[0], (await engine.logprobs([row], pictures=e.pictures))[0]

    reply, scored = run(folder, ask, max_model_len=128)
    expected = own_scores(folder, [*row, *reply.ids], known([e]))
    got = torch.tensor([*scored[1:], *reply.logprobs])
    text = torch.tensor([token < BEGIN for token in [*row[1:], *reply.ids]])
    assert float((got - expected)[text].abs().max()) < 1e-4


def test_new_weights_reach_what_is_seen_of_a_picture(folder: Path) -> None:
    """Its features are computed again where the tower has changed, and a prompt is read anew."""
    [e, *_] = samples(folder)
    row = e.tokens.tolist()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in _TOWERS):
                weight.mul_(1.3)

    async def ask(engine: Any) -> Any:
        before = await engine.logprobs([row], pictures=e.pictures)
        await engine.update_weights(model.state_dict(), 1)
        return before[0], (await engine.logprobs([row], pictures=e.pictures))[0]

    before, after = run(folder, ask, max_model_len=128)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    moved = folder.with_name(folder.name + "_moved")
    model.save_pretrained(moved)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (moved / name).write_bytes((folder / name).read_bytes())
    expected = own_scores(moved, row, known([e]))
    text = [at for at, token in enumerate(row) if at and token < BEGIN]
    assert max(abs(after[at] - float(expected[at - 1])) for at in text) < 1e-4


def test_placeholders_are_never_sampled_beside_a_picture(folder: Path) -> None:
    [e, *_] = samples(folder)
    prompt = e.tokens.tolist()[: e.prompt_length]
    module: Any = AutoModelForImageTextToText.from_pretrained(folder)
    pad = module.config.image_token_id
    with torch.no_grad():  # a model that would write nothing else
        head = module.get_output_embeddings().weight
        head.zero_()
        head[pad] = 1.0

    async def ask(engine: Any) -> Any:
        await engine.update_weights(module.state_dict(), 1)
        asked = Sampling(max_tokens=8, n=4, ignore_eos=True)
        return await engine.generate(prompt, asked, pictures=e.pictures)

    replies = run(folder, ask, max_model_len=128)
    assert not any(token == pad for reply in replies for token in reply.ids)


def test_a_picture_is_seen_once_in_a_micro_batch(folder: Path) -> None:
    """However many samples show it, and whatever is shared."""
    backend = backend_of(folder, max_token_len=999, share_prefix=False)
    looked: list[str] = []
    vision: Any = vision_of(backend.module)
    vision.renew()
    module: Any = backend.module
    tower = module.model.vision_tower if "gemma3" in str(folder) else module.model.visual
    hook = tower.register_forward_hook(lambda *_: looked.append("picture"))
    backend.logprobs(flatten(samples(folder)))
    hook.remove()
    assert len(looked) == 3


def test_positions_are_transformers_own(folder: Path) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    e = samples(folder)[4]
    vision = vision_of(model)
    assert vision is not None
    layout = pack(flatten([e]), vision=vision)
    row = e.tokens.tolist()
    assert layout.rotary is not None
    if "gemma3" in str(folder):  # those of text
        assert layout.rotary.equal(torch.arange(layout.rotary.shape[1])[None])
        return
    plain = torch.tensor([[model.config.image_token_id if t >= BEGIN else t for t in row]])
    shown = [known([e])[token] for token in row if token in known([e])]
    expected, _ = model.model.get_rope_index(
        plain,
        mm_token_type_ids=(plain == model.config.image_token_id).int(),
        image_grid_thw=torch.tensor([each.grid for each in shown]),
    )
    assert layout.rotary.equal(expected[:, 0, : layout.rotary.shape[1]])
