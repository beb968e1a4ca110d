"""A run's folder as a run leaves it, in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from tests.buffer.made import experience
from trireme.batch import flatten
from trireme.buffer.lines import data_lines
from trireme.buffer.record import Record
from trireme.buffer.trained import TrainedTokens
from trireme.experience import EID, Experience
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.trainer.learning import split_pairs


def make_run(folder: Path, *, steps: int = 3, tasks: int = 2, runs: int = 4) -> Path:
    """A run of `steps` steps with groups of `runs`, an evaluation of two tasks at each, a failure,
    a warning, two starts, and what training made of the tokens.
    """
    buffer = folder / "buffer"
    monitor = JsonLinesMonitor(folder / "monitor")
    record = Record(
        database=f"sqlite:///{buffer}/explorer_output.db", lines=buffer / "experience_buffer.jsonl"
    )
    evaluated = Record(
        database=f"sqlite:///{buffer}/evaluation.db",
        lines=buffer / "evaluation.jsonl",
        messages=True,
    )
    failed = Record(lines=buffer / "failed.jsonl")
    learned = TrainedTokens(buffer)
    for step in range(1, steps + 1):
        made = [
            experience(step, task, run, float(run % 2))
            for task in range(tasks)
            for run in range(runs)
        ]
        record._write(made)
        for e in made:
            e.advantages = (e.mask.float() * (2 * (e.reward or 0) - 1)).float()
        batch = flatten(made)
        learned.begin(batch)
        learned.add(batch, torch.full((batch.num_tokens,), -0.25))
        learned.end(step)
        held_out = [
            experience(step, task, 0, 1.0, eid=EID(f"{step}/held_out", task, 0))
            for task in range(2)
        ]
        evaluated._write(held_out)
        figures = {"rollout/reward/mean": step / 10, "rollout/reward/std": 0.5, "rollout/runs": 8.0}
        figures |= {"time/explore": 0.5, "time/model/mean": 3.0, "time/environment/mean": 1.0}
        monitor.log(figures, step, "explorer")
        monitor.log({"eval/held_out/accuracy/mean@1": step / 10, "eval/held_out/tasks": 2.0,
                     "eval/held_out/seconds": 0.1}, step, "eval")  # fmt: skip
        times = {"time/train": 0.2, "time/wait": 0.3, "time/sync": 0.01}
        learned_figures = {"actor/entropy": 1 / step, "actor/kl_loss": float("nan"), **times}
        monitor.log(learned_figures, step, "trainer")
    failure = {"kind": "error", "what": "workflow 'mine'", "message": "ValueError: no", "place": "",
               "trace": "Traceback"}  # fmt: skip
    failed.write_lines([{"eid": "2/1/3/0", "step": 2, "reward": None, "prompt": "What is 1 + 2?",
                         "response": None, "prompt_length": 0, "failure": failure}])  # fmt: skip
    for each in (record, evaluated, failed, learned):
        each.close()
    text = {"cause": "all_equal", "part": "explorer", "step": 2, "sample": "for example: 1",
            "text": "all rewards are equal. What to do: make tasks easier"}  # fmt: skip
    (folder / "monitor/watchdog.json").write_text(json.dumps([text]))
    make_starts(folder)
    return folder


def make_pairs_run(folder: Path) -> Path:
    """A run of DPO that has made one step, of two pairs."""
    buffer = folder / "buffer"
    pairs = [
        Experience(
            [5, 6],
            prompt_length=2,
            chosen=[7, 8],
            rejected=[9],
            eid=EID(0, row),
            prompt_text=f"Row {row}?",
            info={"chosen": "Yes.", "rejected": "No."},
        )
        for row in range(2)
    ]
    record, learned = Record(lines=buffer / "data_rows.jsonl"), TrainedTokens(buffer)
    record.write_lines(data_lines(1, pairs))
    batch = flatten(split_pairs(pairs))
    learned.begin(batch)
    learned.add(batch, torch.full((batch.num_tokens,), -0.5))
    learned.end(1)
    record.close()
    learned.close()
    JsonLinesMonitor(folder / "monitor").log({"actor/dpo_loss": 0.7}, 1, "trainer")
    return folder


def make_starts(folder: Path) -> None:
    """Two starts, the second with another learning rate."""
    (folder / "run").mkdir()
    starts = []
    for number, rate in enumerate((1e-3, 1e-4), 1):
        config = {"seed": 7, "algorithm": {"optimizer": {"lr": rate}}}
        (folder / f"run/start_{number}.yaml").write_text(yaml.safe_dump(config))
        starts.append(
            {
                "time": f"2026-01-0{number}T00:00:00+00:00", "mode": "both", "name": "", "seed": 7,
                "resumed_from": 2 if number == 2 else None, "command": ["/bin/trireme", "run"],
                "folder": "/work", "host": "here", "versions": {"torch": "2"}, "code": {},
                "model": {"path": "nowhere"}, "data": {"buffer.x": {"path": "p", "rows": 3}},
                "config_file": f"start_{number}.yaml",
            }
        )  # fmt: skip
    (folder / "run/starts.json").write_text(json.dumps({"starts": starts}))
