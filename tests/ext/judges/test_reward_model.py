"""Reward models: their scores are transformers' own, and what cannot score is refused."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny import CHATML, make_model, make_reward_model
from trireme.ext.judges.reward_model import scorer_of
from trireme.rewards.grouped import Judge, Row
from trireme.task import Task

QUESTION = {"role": "user", "content": "1+1?"}
TASK = Task(raw_task={"question": "1+1?"})
TEXTS = ["2", "It may well be 2, or 3.", "", "two " * 20, "no", "2"]
TOLERANCE = 1e-5


def rows(texts: list[str]) -> list[Row]:
    return [Row(text, [QUESTION, {"role": "assistant", "content": text}]) for text in texts]


def rewards(options: dict[str, Any], texts: list[str], *others: Any) -> Any:
    """Totals and parts."""
    judge = Judge.of([{"name": "reward_model", **options}, *others])
    return asyncio.run(judge.rewards(TASK, rows(texts)))


def one_by_one(folder: Path, texts: list[str], *, cut: int | None = None) -> list[float]:
    """What transformers gives each conversation alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for row in rows(texts):
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(row.messages, tokenize=False)
        else:
            text = f"1+1?\n{row.completion}"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(input_ids=ids[:, -(cut or 10_000) :]).logits.item())
    return scores


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
@pytest.mark.parametrize(
    ("arch", "pads"), [("qwen2", True), ("qwen3", False), ("llama", False), ("bert", True)]
)
def test_scores_are_those_of_each_conversation_alone(
    tmp_path: Path, arch: str, pads: bool, template: str | None
) -> None:
    folder = make_reward_model(tmp_path, arch, pads=pads, template=template)
    expected = one_by_one(folder, TEXTS)
    assert max(expected) - min(expected) > 0.1  # there is something to tell apart
    for batch_size in (1, 4, 8):
        totals, parts = rewards({"model_path": str(folder), "batch_size": batch_size}, TEXTS)
        assert totals == pytest.approx(expected, abs=TOLERANCE)
    assert parts[0] == {"rewards/reward_model": totals[0], "reward_model_cut": 0.0}


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
def test_a_picture_is_named_to_a_model_that_reads_text(
    tmp_path: Path, template: str | None
) -> None:
    folder = make_reward_model(tmp_path, "qwen3", template=template)
    parts = [{"type": "image", "image": "sha256:1"}, {"type": "text", "text": "1?"}]
    judge = Judge.of([{"name": "reward_model", "model_path": str(folder)}])
    scores = []
    for content in (parts, "[image]1?"):
        asked = {"role": "user", "content": content}
        judged = [Row(text, [asked, {"role": "assistant", "content": text}]) for text in TEXTS]
        scores.append(asyncio.run(judge.rewards(TASK, judged))[0])
    assert scores[0] == scores[1]


def test_what_is_too_long_loses_its_beginning(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path)
    totals, parts = rewards({"model_path": str(folder), "max_length": 30}, TEXTS)
    assert totals == pytest.approx(one_by_one(folder, TEXTS, cut=30), abs=TOLERANCE)
    assert [part["reward_model_cut"] for part in parts] == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_model_is_loaded_once_and_scores_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_reward_model(tmp_path))
    loads: list[str] = []
    load = AutoModelForSequenceClassification.from_pretrained

    def counted(*args: Any, **options: Any) -> Any:
        loads.append(threading.current_thread().name)
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", counted)

    async def go() -> None:
        judges = [Judge.of([{"name": "reward_model", "model_path": folder}]) for _ in range(3)]
        await asyncio.gather(*(judge.rewards(TASK, rows(TEXTS)) for judge in judges))

    asyncio.run(go())
    asyncio.run(go())
    assert loads == [f"reward-model-{tmp_path.name}"]
    assert scorer_of(folder) is scorer_of(folder)


def test_it_is_one_of_several_weighted_rewards(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path)
    options = {"model_path": str(folder), "weight": 0.5}
    totals, parts = rewards(options, TEXTS, {"name": "repetition", "weight": 2.0}, options | {
        "name": "reward_model"})  # fmt: skip
    assert {"rewards/reward_model", "rewards/reward_model_2", "rewards/repetition"} <= {*parts[3]}
    for total, score, part in zip(totals, one_by_one(folder, TEXTS), parts, strict=True):
        assert total == pytest.approx(score + 2 * part["rewards/repetition"], abs=TOLERANCE)
    assert parts[3]["rewards/repetition"] < 0


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's file with plug-ins."""
    module: Any = ModuleType("my_scores")
    seen = module.seen = []

    def centred(scores: list[float], task: Task) -> list[float]:
        seen.append(task)
        return [score - sum(scores) / len(scores) for score in scores]

    module.centred = centred
    module.short = lambda scores, task: scores[:1]
    module.nothing = lambda scores, task: [float("nan")] * len(scores)
    module.alone = lambda scores: scores
    module.Kind = type("Kind", (), {})
    monkeypatch.setitem(sys.modules, "my_scores", module)
    return module


def test_a_plugin_changes_the_scores_of_a_group(tmp_path: Path, plugins: Any) -> None:
    folder = make_reward_model(tmp_path)
    totals, _ = rewards({"model_path": str(folder), "plugin": "my_scores:centred"}, TEXTS)
    alone = one_by_one(folder, TEXTS)
    assert totals == pytest.approx([s - sum(alone) / len(alone) for s in alone], abs=TOLERANCE)
    assert plugins.seen == [TASK]


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("short", r"plug-in 'my_scores:short' gave \[.*: expected a list of 2 numbers"),
        ("nothing", "plug-in 'my_scores:nothing' gave nan: expected a finite number"),
        ("alone", r"takes \(scores\): expected \(scores, task\)"),
        ("Kind", "is type: expected a function"),
        ("missing", "module 'my_scores' has no 'missing'"),
    ],
)
def test_what_a_plugin_may_not_be(tmp_path: Path, plugins: Any, plugin: str, said: str) -> None:
    folder = make_reward_model(tmp_path)
    with pytest.raises(ValueError, match=said):
        rewards({"model_path": str(folder), "plugin": f"my_scores:{plugin}"}, ["2", "3"])


def changed(folder: Path, **values: Any) -> Path:
    """The folder, with other values in its config.json; None takes a key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def without_tokenizer(folder: Path) -> Path:
    for path in (*folder.glob("tokenizer*"), *folder.glob("chat_template*")):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda f: f / "absent" / "model", {}, "is not a file or folder here"),
        (lambda f: f, {}, "holds no config.json"),
        (make_model, {}, "the architecture Qwen3ForCausalLM, which has no score head"),
        (lambda f: make_reward_model(f, labels=3), {}, "has 3 labels: expected 1, the score"),
        (lambda f: changed(make_reward_model(f), id2label=None), {}, "has 2 labels: expected 1"),
        (lambda f: changed(make_reward_model(f), architectures=None), {}, "architecture none"),
        (lambda f: without_tokenizer(make_reward_model(f)), {}, "contains no tokenizer"),
        (make_reward_model, {"max_length": 513}, "has 512 positions, and max_length is 513"),
        (make_reward_model, {"batch_size": 0}, "batch_size is 0: expected at least 1"),
        (make_reward_model, {"max_len": 5}, "has no option 'max_len'"),
    ],
)
def test_what_cannot_score_is_refused_before_anything_is_loaded(
    tmp_path: Path, make: Any, options: dict[str, Any], said: str
) -> None:
    folder = make(tmp_path)
    with pytest.raises(ValueError, match=said) as error:
        Judge.of([{"name": "reward_model", "model_path": str(folder), **options}])
    assert "\n" not in str(error.value)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    judge = Judge.of([{"name": "reward_model", "model_path": "no-such-model"}])
    said = r"model_path \(no-such-model\) is not a folder here, and cannot be downloaded: [^\n]+$"
    with pytest.raises(ValueError, match=said):
        judge.examine(TASK)


def test_the_same_group_gets_the_same_scores_again(tmp_path: Path) -> None:
    folder = str(make_reward_model(tmp_path))
    first = rewards({"model_path": folder}, TEXTS)
    rewards({"model_path": folder, "max_length": 20}, TEXTS[::-1])
    assert rewards({"model_path": folder}, TEXTS) == first


def test_the_model_must_be_named() -> None:
    with pytest.raises(ValueError, match="needs the option 'model_path'"):
        Judge.of(["reward_model"])


def test_a_model_whose_head_is_not_in_its_files_scores_nothing(tmp_path: Path) -> None:
    folder = changed(
        make_model(tmp_path, "qwen2"),
        architectures=["Qwen2ForSequenceClassification"],
        id2label={"0": "score"},
        label2id={"score": 0},
    )
    with pytest.raises(RuntimeError, match=r"cannot score: its files have no weights for score"):
        rewards({"model_path": str(folder)}, ["2"])


def test_a_template_that_refuses_a_conversation_fails_with_the_models_name(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, template="{{ raise_exception('no such role') }}")
    with pytest.raises(RuntimeError, match=f"the reward model {folder} cannot score: no such role"):
        rewards({"model_path": str(folder)}, ["2"])
