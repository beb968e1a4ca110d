"""The gallery of SmolLM2 without its model: rewards, tasks, the game, the table."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trireme import Task

pytestmark = pytest.mark.extension("multi_turn", "converters")
FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The gallery's files as modules, with a vocabulary of a few words."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("rewards", "word_chain", "gallery", "make_data")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {name: importlib.import_module(name) for name in names}
    few = ("eat", "tree", "egg", "garden", "new", "wet", "ten", "net", "town", "east")
    for name in ("word_chain", "make_data"):
        monkeypatch.setattr(found[name], "common", lambda: few)
    monkeypatch.setattr(found["word_chain"], "known", lambda: frozenset(few))
    yield found
    for name in names:
        sys.modules.pop(name, None)


def test_rewards_count_words_and_check_constraints(modules: dict[str, Any]) -> None:
    rewards = modules["rewards"]
    exact, holds, obeys = rewards.exact_words, rewards.holds, rewards.obeys
    task = Task({"answer": "12"}, format_args={"response_key": "answer"})
    texts = ["a b c d e f", "It's a well-known, old, red fruit.", "one", "", "a " * 12]
    counts = [exact(task, text, count=6) for text in texts]
    assert counts == pytest.approx([1, 1, 1 / 6, 0, 0])
    assert holds({"kind": "contains", "word": "home"}, "At Home.")
    assert not holds({"kind": "avoids", "word": "the"}, "On The road")
    assert not holds({"kind": "avoids", "word": "the"}, "")  # silence is no way out
    assert holds({"kind": "bullets", "count": 3}, "- a\n- b\n- c")
    assert not holds({"kind": "bullets", "count": 3}, "- a\n- b")
    assert holds({"kind": "lower_case"}, "abc") and not holds({"kind": "lower_case"}, "Abc")
    rules = [{"kind": "lower_case"}, {"kind": "short", "count": 2}]
    assert obeys(task, "a b", rules=rules) == {"obeyed": 0.5, "all_obeyed": 0.5}
    assert obeys(task, "a b c", rules=rules) == {"obeyed": 0.25, "all_obeyed": 0}
    right, answered = rewards.right_sum, rewards.right_answer
    assert (right(task, "5 + 7 = 12."), right(task, "12 or 13"), right(task, "")) == (1, 0, 0)
    assert (answered(task, "Answer: 12"), answered(task, "12")) == (1, 0)


def test_held_out_tasks_are_others(modules: dict[str, Any]) -> None:
    data = modules["make_data"]
    for train, test in (data.words(), data.sums(), data.products()[:2], data.chains()):
        asked = [{row["question"] for row in rows} for rows in (train, test)]
        assert len(test) == len(asked[1]) == data.NUM_HELD_OUT and not asked[0] & asked[1]
    train, test = data.constraints()
    kinds = [{tuple(r["kind"] for r in row["rules"]) for row in rows} for rows in (train, test)]
    assert kinds[1] == data.HELD_OUT_PAIRS and not kinds[0] & kinds[1]
    things = [{row["question"].split(".")[0] for row in rows} for rows in (train, test)]
    assert not things[0] & things[1]


def test_a_game_ends_with_a_word_that_does_not_fit(modules: dict[str, Any]) -> None:
    async def play(*words: str) -> tuple[float, bool]:
        env = modules["word_chain"].WordChain({"first": "apple"})
        await env.reset(None)
        total, done = 0.0, False
        for word in words:
            assert not done
            _, points, done, _ = await env.step([{"role": "assistant", "content": word}])
            total += points
        return total, done

    assert asyncio.run(play("Eat.")) == (0.25, False)
    assert asyncio.run(play("tree")) == (0, True)
    assert asyncio.run(play("eggplant")) == (0, True)  # not among the known words
    assert asyncio.run(play("exit")) == (0, True)
    assert asyncio.run(play("eat", "eat")) == (0.25, True)
    shown = modules["make_data"].played([{"env_config": {"first": "apple"}}] * 9)
    assert all(row["messages"][1]["content"] == "apple" for row in shown)
    assert len({len(row["messages"]) for row in shown}) > 1


def test_pairs_are_of_one_task_and_differ(modules: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    rewards = itertools.cycle([0.0, 0.5, 0.9])
    rows = [
        {
            "step": step,
            "stop_reason": "length" if n == 5 else "stop",
            "prompt": f"<|im_start|>user\nQ{step}<|im_end|>\n<|im_start|>assistant\n",
            "response": f"{step} {n}",
            "reward": next(rewards),
        }
        for step in (1, 2, 99)
        for n in range(6)
    ]
    file = tmp_path / "buffer" / "experience_buffer.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, labelled = modules["make_data"].collect(tmp_path)
    assert len(labelled) == 10 and {row["prompt"] for row in labelled} == {"Q1", "Q2"}
    assert pairs and all(p["chosen"][0] == p["rejected"][0] == p["prompt"][1] for p in pairs)


def test_the_page_has_the_table_of_the_results(modules: dict[str, Any]) -> None:
    gallery = modules["gallery"]
    rows = gallery.rows()
    assert rows and all(row["name"] in gallery.PLANNED for row in rows)
    page = (FOLDER / "README.md").read_text("utf-8")
    assert gallery.table(rows) in page
    for name, (file, _) in gallery.PLANNED.items():
        assert (FOLDER / f"{file}.yaml").is_file(), name


def test_gguf_models_folder_is_the_one_of_the_yamls() -> None:
    script = runpy.run_path(str(FOLDER.parents[1] / "scripts" / "smollm2.py"))
    named = f"./{script['FOLDER'].relative_to(FOLDER.parents[1])}"
    for file in FOLDER.glob("*.yaml"):
        assert f"model_path: ${{oc.env:TRIREME_MODEL_PATH,{named}}}" in file.read_text(), file
