"""What a run keeps for people is there once, complete, and changes nothing that is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.job import small_config
from trireme.buffer.trained import files
from trireme.config import load_config
from trireme.launch.check import make_plans
from trireme.launch.stages import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.view.rollouts import Filter, RolloutIndex
from trireme.view.runs import find_runs
from trireme.view.tokens import Tokens


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
    weights = [folder / "global_step_4/actor/huggingface/model.safetensors"
               for folder in (job, other)]  # fmt: skip
    assert weights[0].read_bytes() == weights[1].read_bytes()
