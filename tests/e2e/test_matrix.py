"""The matrix: whether features hold together, and whether `check` says the truth of each run.

Every pair of values that can go together occurs in some case. Each case is a run of seconds by the
real command: it ends well, no experience is lost or doubled, and where the Plan promises equal
bytes a second run and one that was killed and resumed have them.
"""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs

from tests.e2e.job import (
    Forked,
    command,
    rows,
    run_fresh,
    small_config,
    started,
    wait_for,
    write_jsonl,
)
from tests.tiny import CHATML, make_model
from trireme.config import Plan
from trireme.experience import Experience
from trireme.launch.check import examine
from trireme.model.model import Model
from trireme.task import Task

STEPS, TASKS, RUNS = 3, 2, 2
VALUES: dict[str, list[str]] = {
    "algorithm": ["grpo", "multi_step_grpo", "ppo", "mix", "dpo", "sft"],
    "style": ["fixed", "offset", "explorer_driven", "trainer_driven", "fully_async"],
    "store": ["queue", "sql", "file", "replay", "replay_again"],
    "engine": ["embedded", "process", "remote"],
    "episode": ["single", "steps", "tools"],
    "trains": ["full", "lora"],
    "commands": ["one", "two"],
}


class Case(NamedTuple):
    """One value of each."""

    algorithm: str
    style: str
    store: str
    engine: str
    episode: str
    trains: str
    commands: str


OF_DATA: dict[str, str] = {
    "style": "fixed", "store": "file", "engine": "embedded", "episode": "single", "commands": "one",
}  # fmt: skip


EXACT = [
    Case("multi_step_grpo", "fixed", "sql", "embedded", "steps", "lora", "one"),
    Case("ppo", "fixed", "replay", "embedded", "tools", "full", "one"),
    Case("mix", "fixed", "sql", "embedded", "single", "lora", "one"),
    Case("grpo", "fixed", "replay_again", "embedded", "tools", "full", "one"),
]
"""Equal bytes are promised where three values meet, which pairs alone need not do."""


def has_meaning(row: Sequence[str]) -> bool:
    """What can go together, of a case or its beginning. Who learns from data has no explorer, and
    so no style, engine, episode or second command, and the store is the file; all else can.
    """
    given = dict(zip(VALUES, row, strict=False))
    if given["algorithm"] not in ("dpo", "sft"):
        return True
    return all(given.get(key, value) == value for key, value in OF_DATA.items())


def all_cases() -> list[Case]:
    """The library's pairs, and a case for each pair that its search leaves out under the rule."""
    cases = [Case(*row) for row in AllPairs(list(VALUES.values()), filter_func=has_meaning)]
    cases += [case for case in EXACT if case not in cases]
    missing = possible_pairs().difference(*map(pairs, cases))
    while missing:
        best = max(possible(), key=lambda case: len(missing & pairs(case)))
        cases.append(best)
        missing -= pairs(best)
    return cases


def possible() -> list[Case]:
    """Every case that has a meaning."""
    return [Case(*row) for row in itertools.product(*VALUES.values()) if has_meaning(row)]


def possible_pairs() -> set[tuple[tuple[str, str], ...]]:
    """Every pair of values that can go together."""
    return set().union(*map(pairs, possible()))


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """All pairs of a case's values."""
    return set(itertools.combinations(zip(VALUES, case, strict=True), 2))


CASES = all_cases()


QUICK = [
    Case("ppo", "fixed", "replay", "embedded", "tools", "full", "one"),
    Case("dpo", "fixed", "file", "embedded", "single", "lora", "one"),
    Case("ppo", "fully_async", "sql", "embedded", "single", "full", "two"),
    Case("grpo", "fully_async", "file", "embedded", "single", "full", "one"),
    Case("grpo", "trainer_driven", "replay_again", "embedded", "single", "full", "one"),
]
"""In every `make test`, half a minute in all; the others are for `make test-long`."""


def parameters() -> list[Any]:
    """The cases, each with its name."""
    assert set(QUICK) < set(CASES)
    minutes: dict[bool, list[Any]] = {True: [], False: [pytest.mark.large]}
    return [pytest.param(c, id="-".join(c), marks=minutes[c in QUICK]) for c in CASES]


TOOL = {"type": "function", "function": {"name": "add"}}
TEMPLATE = "{%- if tools %}{{- tools | tojson }}{%- endif %}" + CHATML


async def two_steps(task: Task, model: Model) -> list[Experience]:
    """Two experiences a rollout."""
    rewards = []
    for text in ("first", "second"):
        reply = await model.chat([{"role": "user", "content": f"{task.prompt} {text}"}])
        rewards.append(_reward(reply.text))
    return model.experiences(reward=rewards)


async def with_tools(task: Task, model: Model) -> list[Experience]:
    """One experience with two sampled segments, and a tool's answer between them."""
    chat: list[Any] = [{"role": "user", "content": task.prompt}]
    reply = await model.chat(chat, tools=[TOOL])
    chat += [reply.message, {"role": "tool", "content": "3"}]
    reply = await model.chat(chat, tools=[TOOL])
    return model.experiences(reward=_reward(reply.text))


def _reward(text: str) -> float:
    return (sum(map(ord, text)) % 17) / 16


def config_of(case: Case, folder: Path, url: str | None) -> dict[str, Any]:
    """The YAML of a case."""
    config = small_config(folder)
    make_model(folder / "model", max_len=384, template=TEMPLATE)
    config["model"] |= {"max_response_tokens": 4, "max_model_len": 192}
    config["trainer"]["save_interval"] = 1
    if case.trains == "lora":
        config["model"]["lora_configs"] = [{"name": "a", "lora_rank": 4}]
    config["algorithm"]["algorithm_type"] = case.algorithm
    if case.algorithm in ("dpo", "sft"):
        return _from_data(case, config, folder)
    buffer = config["buffer"] | {"batch_size": TASKS, "total_steps": STEPS}
    buffer["explorer_input"]["eval_tasksets"] = []
    workflow = {"single": "simple_workflow", "steps": "two_steps", "tools": "with_tools"}
    name = workflow[case.episode]
    buffer["explorer_input"]["default_workflow_type"] = (
        name if name == "simple_workflow" else f"tests.e2e.test_matrix:{name}"
    )
    config["algorithm"]["repeat_times"] = RUNS
    buffer["train_batch_size"] = TASKS * RUNS
    buffer["trainer_input"] = {"experience_buffer": _store(case, folder)}
    if case.algorithm == "mix":
        experts = write_jsonl(folder / "expert.jsonl", rows(5))
        buffer["trainer_input"]["auxiliary_buffers"] = {"sft_dataset": {"path": str(experts)}}
        buffer["train_batch_size"] += 1
        config["algorithm"]["sample_strategy_args"] = {"expert_data_ratio": 0.2}
    config["buffer"] = buffer
    style = "fixed" if case.style == "offset" else case.style
    config["synchronizer"] = {"sync_style": style, "sync_offset": int(case.style == "offset")}
    config["explorer"] |= {"eval_interval": 100, "eval_on_startup": False}
    if case.engine == "process":
        config["explorer"]["rollout_model"] = {"engine_type": "torch", "engine_num": 2}
    if url is not None:
        config["explorer"]["rollout_model"] = {"engine_type": "remote", "base_urls": [url]}
    return config


def _store(case: Case, folder: Path) -> dict[str, Any]:
    replay: dict[str, Any] = {"enable": True}
    if case.store == "replay_again":
        # uses are limited: a batch of what has rested would be followed by another for ever
        replay |= {
            "reuse_cooldown_time": 0.01,
            "priority_fn": "decay_limit_randomization",
            "priority_fn_args": {"use_count_limit": 2},
        }
    return {"name": "store"} | {
        "queue": {},
        "sql": {"storage_type": "sql"},
        "file": {"storage_type": "file", "path": str(folder / "copy.jsonl")},
        "replay": {"replay_buffer": replay},
        "replay_again": {"replay_buffer": replay},
    }[case.store]


def _from_data(case: Case, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    data = rows(STEPS * TASKS)
    columns = {"prompt_key": "question", "response_key": "answer"}
    if case.algorithm == "dpo":
        data = [{"prompt": r["question"], "chosen": r["answer"], "rejected": "no"} for r in data]
        columns = {}
    store = {
        "name": "data",
        "path": str(write_jsonl(folder / "learned.jsonl", data)),
        "format": columns,
    }
    config["mode"] = "train"
    config["buffer"] = {
        "train_batch_size": TASKS,
        "total_epochs": 1,
        "trainer_input": {"experience_buffer": store},
    }
    return config


@pytest.mark.parametrize("case", parameters())
def test_a_case(tmp_path: Path, case: Case) -> None:
    remote = serving(tmp_path) if case.engine == "remote" else nullcontext()
    with remote as url:
        config = config_of(case, tmp_path, url)
        job = tmp_path / "checkpoints/tests/job"
        if case.commands == "two":
            run_two(tmp_path, config, 2 if case.episode == "steps" else 1)
            nothing_lost(case, job)
            return
        plan = plan_of(tmp_path, config)
        started(tmp_path, config).ends_well()
        nothing_lost(case, job)
    exact = case.algorithm in ("dpo", "sft") or (
        (case.style, case.engine) == ("fixed", "embedded") and case.store != "replay_again"
    )
    assert plan.deterministic == exact
    if exact:
        again = tmp_path / "checkpoints/tests/again"
        started(tmp_path, config, "name=again").kill_when(again / "global_step_1")
        started(tmp_path, config, "name=again").ends_well()
        nothing_lost(case, again)
        assert last_weights(again) == last_weights(job), "killed and resumed"
    if case in EXACT and exact:  # by a process with another hash seed
        third = tmp_path / "checkpoints/tests/third"
        done = run_fresh(tmp_path, config, "name=third")
        assert done.returncode == 0, done.stdout + done.stderr
        assert last_weights(third) == last_weights(job)


def plan_of(folder: Path, config: dict[str, Any]) -> Plan:
    """What `check` says of it: one Plan and no problem."""
    command(folder, config)
    [plan], problems, _ = examine(folder / "config.yaml")
    assert not problems
    return plan


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a rollout server of the case's model."""
    folder.joinpath("server").mkdir()
    model = make_model(folder / "server/model", max_len=384, template=TEMPLATE)
    words = ["rollout", "--model", str(model), "--port", "0", "--max-model-len", "192"]
    command = Forked(words, folder / "server")
    try:
        wait_for(lambda: "serving" in command.said(), command)
        [url] = re.findall(r"serving .* on (http://[\d.:]+)", command.said())
        yield url
    finally:
        command.kill()


def run_two(folder: Path, config: dict[str, Any], experiences: int) -> None:
    """Explorer and trainer as two commands; a rollout leaves that many `experiences`."""
    config["buffer"]["trainer_input"]["experience_buffer"]["storage_type"] = "sql"
    config["buffer"]["trainer_input"]["experience_buffer"].pop("path", None)
    config["trainer"]["total_steps"] = STEPS * experiences
    commands = []
    for mode in ("explore", "train"):
        (folder / mode).mkdir()
        commands.append(started(folder / mode, config, f"mode={mode}"))
    try:
        for each in commands:
            each.ends_well()
    finally:
        for each in commands:
            each.kill()


def nothing_lost(case: Case, job: Path) -> None:
    """Every experience that was made was put once and trained once; the expert's beside them."""
    trained = part_metrics(job, "trainer")
    total = sum(row["perf/experiences"] for row in trained)
    if case.algorithm in ("dpo", "sft"):
        assert total == STEPS * TASKS * (2 if case.algorithm == "dpo" else 1)  # pairs
        return
    own = total - sum(row.get("sample/expert_count", 0) for row in trained)
    made = STEPS * TASKS * RUNS * (2 if case.episode == "steps" else 1)
    eids, uses = put_into(case, job)
    assert set(eids.values()) == {1}
    if case.store != "replay_again":
        assert len(eids) == own == made and uses in (None, made)
    elif case.commands == "one":
        assert len(eids) == made <= own <= 2 * made
    else:  # the trainer ends after its steps, whatever lies there
        assert len(eids) <= made and uses == own


def part_metrics(job: Path, part: str) -> list[dict[str, float]]:
    lines = (job / "monitor/metrics.jsonl").read_text().splitlines()
    found = {r["step"]: r["metrics"] for r in map(json.loads, lines) if r["part"] == part}
    return list(found.values())  # a resume tells a step again


def put_into(case: Case, job: Path) -> tuple[Counter[str], int | None]:
    """The ids that the store, or its copy, has; a database also says how often each was used."""
    if case.commands == "one" and case.store != "sql":
        copy = (
            job / "buffer/experience_buffer.jsonl"
            if case.store != "file"
            else job.parents[2] / "copy.jsonl"
        )
        return Counter(json.loads(line)["eid"] for line in copy.read_text().splitlines()), None
    with sqlite3.connect(job / "buffer/store.db") as database:
        found = database.execute("select msg_id, consumed, claimed_by from store").fetchall()
    assert all(claimed is None for _, _, claimed in found)
    if case.store != "replay_again":
        assert {consumed for _, consumed, _ in found} == {1}
    return Counter(uid for uid, _, _ in found), sum(consumed for _, consumed, _ in found)


def last_weights(job: Path) -> bytes:
    steps = [int(path.name.removeprefix("global_step_")) for path in job.glob("global_step_*")]
    folder = job / f"global_step_{max(steps)}" / "actor/huggingface"
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm.algorithm_type=sft"], "mode is 'both': expected train, since sft reads data"),
        (
            ["synchronizer.sync_offset=1", "deterministic=true"],
            "deterministic is true: expected synchronizer.sync_offset 0, not 1",
        ),
        (
            ["algorithm.sample_strategy=explore_step", STORE_SQL := (
                "buffer.trainer_input.experience_buffer.storage_type=sql"
            )],
            "expected mode both and a queue as store",
        ),
        (
            [STORE_SQL, "deterministic=true",
             "buffer.trainer_input.experience_buffer.replay_buffer.enable=true"],
            "expected a replay_buffer that is not in a database (storage_type sql)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_refused_in_one_sentence(
    tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    command = started(tmp_path, small_config(tmp_path), *overrides)
    assert command.wait() == 2, command.said()
    assert sentence in " ".join(command.said().split())


def test_every_pair_that_has_a_meaning_occurs() -> None:
    assert set().union(*map(pairs, CASES)) == possible_pairs()
