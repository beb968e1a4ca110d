"""`trireme view` shows what is trained: by brackets without colour, by styles with it."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from tests.odd import ALL
from tests.test_text import commands_in
from tests.tiny import make_model
from trireme.buffer.record import Record
from trireme.cli.samples import Sample
from trireme.experience import EID, Experience
from trireme.ext.page.samples import Wanted, _coloured, view

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "weight": 0.5},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def config(folder: Path, algorithm: str, row: dict[str, Any]) -> Path:
    data = folder / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    values = {
        "mode": "train",
        "checkpoint_root_dir": str(folder / "checkpoints"),
        "algorithm": {"algorithm_type": algorithm},
        "model": {"model_path": str(make_model(folder / "model")), "max_model_len": 128},
        "buffer": {
            "train_batch_size": 1,
            "trainer_input": {"experience_buffer": {"path": str(data)}},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    # the tokenizer is all that is read
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def test_rows_of_an_sft_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view(config(tmp_path, "sft", {"messages": CHAT}), None, color=False) == 0
    assert capsys.readouterr().out == (
        "--- row 0: 51 tokens, 4 trained\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n[[2<|im_end|>]](x0.5)\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n"
    )


@pytest.mark.parametrize(("sampled", "left"), [(0, "the newest"), (1, "a sample of whole groups")])
def test_a_copy_that_was_cut_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampled: bool, left: str
) -> None:
    path = tmp_path / "job/buffer/x.db"
    lines = tmp_path / "job/buffer/experience_buffer.jsonl"

    def written(step: int) -> None:
        record._write([
            Experience([1, 2], prompt_length=1, eid=EID(step, 0, run), prompt_text="ask " * 20,
                       response_text=f"reply {step} " * 10)
            for run in range(8)
        ])  # fmt: skip

    record = Record(database=f"sqlite:///{path}", lines=lines, limit=30_000, sampled=bool(sampled))
    written(1)
    assert view(None, None, folder=tmp_path / "job", color=False) == 0
    assert "note:" not in capsys.readouterr().out
    for step in range(2, 20):
        written(step)
    for place in (tmp_path / "job", lines):
        assert view(None, str(place) if place == lines else None, folder=tmp_path / "job") == 0
        note = capsys.readouterr().out.splitlines()[1]
        assert "this copy was cut at its limit (data_processor.experience_pipeline." in note
        assert f"{left} stayed" in note
        kept = [json.loads(line) for line in lines.read_text().splitlines()]
        assert place != lines or f" {19 * 8 - len(kept)} experiences are gone" in note
    record.rewind(0)
    written(1)
    record.close()
    assert view(None, None, folder=tmp_path / "job", color=False) == 0
    assert "note:" not in capsys.readouterr().out


def test_stored_experiences_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model")
    url = f"sqlite:///{tmp_path}/x.db"
    record = Record(database=url, lines=tmp_path / "x.jsonl")
    e = Experience([20, 21, 22], mask=[False, True, False], eid=EID(3, 1, 2), reward=0.5)
    e.prompt_text, e.response_text = "ask", "reply"
    record._write([e])
    record.close()
    assert view(None, url, tokenizer=str(model), color=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- 3/1/2/0, reward 0.5, model version -1: 3 tokens, 1 trained")
    assert out.count("[[") == 1
    for place in (str(tmp_path / "x.db"), str(tmp_path / "x.jsonl")):
        assert view(None, place, color=False) == 0
        assert "ask[[reply]]" in capsys.readouterr().out
    assert view(None, url, table="other", color=False) == 1
    assert "has no table 'other': it has experiences" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_those_of_one_task_are_shown_one_by_one(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their bytes are together in the database; some of them are written again, others go."""
    url = f"sqlite:///{tmp_path}/x.db"
    if kind == "postgres":
        url = request.getfixturevalue("postgres").database()
    record = Record(database=url, limit=4000)

    def group(task: int, rewards: Sequence[float]) -> list[Experience]:
        return [
            Experience([20, 21, 22], mask=[False, True, True], eid=EID(1, task, run), reward=reward,
                       prompt_text=f"ask {task}", response_text=f"reply {run} for {reward}")
            for run, reward in enumerate(rewards)
        ]  # fmt: skip

    def shown() -> list[str]:
        assert view(None, url, color=False, wanted=Wanted(count=9)) == 0
        return re.findall(r"ask (\d\[\[reply \d for .*?)\]\]", capsys.readouterr().out)[::-1]

    record._write(group(0, [0.0, 0.1, 0.2]) + group(1, [0.5]))
    assert shown() == [
        *(f"0[[reply {run} for 0.{run}" for run in range(3)),
        "1[[reply 0 for 0.5",
    ]
    record._write(group(0, [0.0, 0.9])[1:])
    assert shown() == ["0[[reply 0 for 0.0", "0[[reply 2 for 0.2", "1[[reply 0 for 0.5",
                       "0[[reply 1 for 0.9"]  # fmt: skip
    record._write(group(2, [0.3] * 6))  # past the limit: the oldest go
    record.close()
    left = shown()
    assert left[-6:] == [f"2[[reply {run} for 0.3" for run in range(6)] and 6 <= len(left) < 9


def test_a_runs_folder_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job"
    make_model(job / "global_step_2/actor/huggingface")
    record = Record(database=f"sqlite:///{job}/buffer/explorer_output.db")
    rewards = [0.5, 1.0, 0.0, None]
    record._write(
        [
            Experience([20, 21, 22], mask=[False, True, True], eid=EID(step, 0), reward=reward)
            for step, reward in enumerate(rewards, 1)
        ]
    )
    record.close()

    def shown(**options: Any) -> list[str]:
        assert view(None, None, folder=job, color=False, wanted=Wanted(**options)) == 0
        out = capsys.readouterr().out
        assert "3 tokens, 2 trained" in out  # counted with the run's own tokenizer
        return [line.split("/")[0].removeprefix("--- ") for line in out.splitlines()[::2]]

    assert shown() == ["4", "3", "2"]
    assert shown(order="best", count=9) == ["2", "1", "3"]
    assert shown(order="worst", count=1) == ["3"]
    assert shown(step=1) == ["1"]
    store = str(job / "buffer/explorer_output.db")
    assert view(None, store, color=False) == 0  # the tokenizer is found from here too
    assert "3 tokens, 2 trained" in capsys.readouterr().out
    for place in (None, store):
        folder = job if place is None else None
        assert view(None, place, folder=folder, wanted=Wanted(step=7)) == 1
        told = "error: the store has no experiences of step 7: it has steps 1 to 4"
        assert told in capsys.readouterr().err
    assert view(None, None, folder=job / "global_step_2") == 1
    assert "contains neither stored experiences" in capsys.readouterr().err


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view(None, None) == 1
    assert "view needs the folder of a run, --config" in capsys.readouterr().err
    assert view(None, str(tmp_path / "none.db")) == 1
    assert "none.db: has the run stored experiences yet?" in capsys.readouterr().err
    for name, told in (("x.yaml", "is not a readable database"), ("x.jsonl", "that no run stored")):
        (tmp_path / name).write_text('{"question": "1+1?", "answer": "2"}\n' * 99)
        assert view(None, str(tmp_path / name)) == 1
        assert told in capsys.readouterr().err


def test_weights_and_masks_have_colours_of_their_own() -> None:
    parts = [("<s>", 0.0, True), ("ask", 0.0, False), ("reply", 1.0, False), ("more", 0.5, False)]
    text = _coloured(Sample("x", parts))
    assert text.plain == "<s>askreplymore(x0.5)"
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles == {"<s>": "dim", "reply": "green", "more": "yellow", "(x0.5)": "yellow italic"}


def test_stored_rollouts_show_roles_instead_of_the_templates_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    said: list[tuple[str, bool, dict[str, Any] | None]] = [
        ("<|im_start|>user\n", False, None),
        ("2+2?", False, {"role": "user", "content": "2+2?"}),
        ("<|im_end|>\n<|im_start|>assistant\n", False, None),
        ("<think>so</think>add(2, 2)<|im_end|>", True,
         {"role": "assistant", "content": "", "tool_calls": [call]}),
        ("\n<|im_start|>tool\n", False, None),
        ("4", False, {"role": "tool", "content": "4"}),
        ("<|im_end|>\n<|im_start|>assistant\n", False, None),
        ("It is 4<|im_end|>", True, {"role": "assistant", "content": "It is 4"}),
    ]  # fmt: skip
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, *_ in said]
    mask = [trained for ids, (_, trained, _) in zip(pieces, said, strict=True) for _ in ids]
    experience = Experience(
        tokens=torch.tensor([i for ids in pieces for i in ids]), mask=torch.tensor(mask),
        reward=1.0, eid=EID(1, 0),
        messages=[message for *_, message in said if message],
    )  # fmt: skip
    url, model = f"sqlite:///{tmp_path}/x.db", str(tmp_path / "model")
    record = Record(database=url)
    record._write([experience])
    record.close()
    assert view(None, url, tokenizer=model, color=False) == 0
    assert capsys.readouterr().out.partition("\n")[2] == (
        "user: 2+2?\nassistant: [[<think>so</think>add(2, 2)<|im_end|>]]\n"
        "tool: 4\nassistant: [[It is 4<|im_end|>]]\n"
    )
    assert view(None, url, tokenizer=model, color=False, wanted=Wanted(raw=True)) == 0
    assert capsys.readouterr().out.count("<|im_start|>assistant\n[[") == 2
    experience.messages = [{"role": "user", "content": "edited by the template"}]
    edited = f"sqlite:///{tmp_path}/y.db"
    record = Record(database=edited)
    record._write([experience])
    record.close()
    assert view(None, edited, tokenizer=model, color=False) == 0
    assert "<|im_start|>user\n2+2?" in capsys.readouterr().out, "nothing is left out by a guess"


def test_odd_texts_are_shown_and_a_damaged_row_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(database=f"sqlite:///{tmp_path}/x.db", lines=tmp_path / "x.jsonl")
    turns = [{"role": "user", "content": ALL}, {"role": "assistant", "content": ALL}]
    record._write([
        Experience([20, 21, 22], mask=[False, True, False], eid=EID(1, n), prompt_text=ALL,
                   response_text=f"reply {ALL}", messages=turns)
        for n in range(2)
    ])  # fmt: skip
    record.close()
    for place in ("x.db", "x.jsonl"):
        for color in (False, True):
            assert view(None, str(tmp_path / place), color=color) == 0
            said = capsys.readouterr().out
            assert "\u241b]0;owned" in said and "\x1b]0;owned" not in said
            assert color or commands_in(said) == set()
    with closing(sqlite3.connect(tmp_path / "x.db")) as database, database:
        (data,) = database.execute("SELECT data FROM experiences_blocks").fetchone()
        bad = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        database.execute("UPDATE experiences_blocks SET data = ? WHERE id = 1", [bad])
    assert view(None, str(tmp_path / "x.db"), color=False) == 0
    said = capsys.readouterr().out
    assert "--- row 1 of table experiences is damaged (" in said and "--- 1/1/0/0" in said
