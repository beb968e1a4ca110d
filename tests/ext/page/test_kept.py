"""What a run keeps for people is there once, complete, and changes nothing that is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.job import small_config, write_jsonl
from trireme.buffer.trained import files
from trireme.config import load_config
from trireme.ext.page.rollouts import Filter, RolloutIndex
from trireme.ext.page.runs import find_runs
from trireme.ext.page.tokens import Tokens
from trireme.launch.check import make_plans
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console


def played(folder: Path, config: dict[str, Any], name: str, *, keeps: bool) -> Path:
    kept = {"data_processor": {"experience_pipeline": {"save_input": keeps}}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | kept | {"name": name}))
    run_stages(make_plans(load_config(path)), console=Console(), stop=Stop(), compare_sft=False)
    return folder / "checkpoints/tests" / name


def test_a_run_keeps_what_the_page_shows_and_trains_the_same_without(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    job = played(tmp_path, config, "keeps", keeps=True)
    lines = (job / "buffer/evaluation.jsonl").read_text().splitlines()
    eids = [json.loads(line)["eid"] for line in lines]
    # the evaluation at the end is the one of step 4 again, with the last weights
    assert sorted(eids) == [f"{step}/held_out/{n}/0/0" for step in (0, 2, 4) for n in range(3)]
    assert [step for step, _ in files(job / "buffer/trained")] == [1, 2, 3, 4]
    (run,) = find_runs(job)
    rollouts = RolloutIndex(job)
    rollouts.refresh()
    best = rollouts.rows(rollouts.select(Filter(kind="train", order="best"))[:1])[0]
    shown = Tokens(run).of(best["eid"])
    assert shown["trained_step"] == best["step"]
    new = [v for v in shown["trained_logprobs"] if v is not None]
    old = [v for v, m in zip(shown["logprobs"], shown["mask"], strict=True) if m]
    if new:  # lock-step: the ratio is 1 but for rounding
        assert max(abs(a - b) for a, b in zip(new, old, strict=True)) < 1e-4
    other = played(tmp_path, config, "keeps_not", keeps=False)
    assert not list((other / "buffer").glob("trained/*"))
    assert not (other / "buffer/evaluation.jsonl").exists()
    held_out = Tokens(run).of("2/held_out/1/0/0", "eval")
    assert sum(held_out["mask"]) == len([v for v in held_out["logprobs"] if v is not None]) > 0
    weights = [folder / "global_step_4/actor/huggingface/model.safetensors"
               for folder in (job, other)]  # fmt: skip
    assert weights[0].read_bytes() == weights[1].read_bytes()


def on_rows(folder: Path, algorithm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Three steps of four rows of a data set, which has six."""
    config = small_config(folder)
    data = write_jsonl(folder / f"{algorithm}.jsonl", rows)
    return config | {
        "mode": "train",
        "algorithm": {"algorithm_type": algorithm, "optimizer": {"lr": 1e-3}},
        "buffer": {
            "train_batch_size": 4,
            "total_steps": 3,
            "trainer_input": {"experience_buffer": {"path": str(data)}},
        },
        "trainer": {"save_interval": 1},
    }


def test_the_rows_of_a_data_set_are_kept_with_their_tokens_and_once_after_a_resume(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(6)]
    config = on_rows(tmp_path, "sft", rows)
    job = played(tmp_path, config, "sft", keeps=True)
    shutil.rmtree(job / "global_step_3")  # as of a run that was killed in its last step
    assert played(tmp_path, config, "sft", keeps=True) == job
    rollouts = RolloutIndex(job)
    rollouts.refresh()
    facts = rollouts.facts()
    assert list(facts) == ["data"] and facts["data"]["count"] == 12
    assert facts["data"]["steps"] == [1, 2, 3]
    found = rollouts.rows(rollouts.select(Filter(kind="data", text="What is 3 + 1?")))
    assert [row["task"] for row in found] == ["3", "3"] and found[0]["eid"] != found[1]["eid"]
    (run,) = find_runs(job)
    shown = Tokens(run).of(found[0]["eid"], "data")
    said = [text for text, m in zip(shown["text"], shown["mask"], strict=True) if m]
    assert "".join(said).startswith("It is 4.") and shown["trained_step"] == found[0]["step"]
    assert all((v is not None) == bool(m)
               for v, m in zip(shown["trained_logprobs"], shown["mask"], strict=True))  # fmt: skip
    assert shown.get("ratio") is None and shown["versions"] is None


def test_both_replies_of_a_pair_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "chosen": f"{n + 1}.", "rejected": "No."} for n in range(6)]
    job = played(tmp_path, on_rows(tmp_path, "dpo", rows), "dpo", keeps=True)
    rollouts = RolloutIndex(job)
    rollouts.refresh()
    (row, *_) = rollouts.rows(rollouts.select(Filter(kind="data", text="4 + 1?")))
    pair = rollouts.rows(rollouts.select(Filter(kind="data", group=row["group"], order="oldest")))
    assert [one["info"]["reply"] for one in pair] == ["chosen", "rejected"]
    assert pair[0]["response"].startswith("5.") and pair[1]["response"].startswith("No.")
    (run,) = find_runs(job)
    for one in pair:
        shown = Tokens(run).of(one["eid"], "data")
        said = [text for text, m in zip(shown["text"], shown["mask"], strict=True) if m]
        assert "".join(said) == one["response"]
