"""Runs on a Ray cluster of several nodes: the same result as in one process, and every death seen.

Nodes are processes of this machine; each has a CPU as its one place.
"""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.job import run, small_config, wait_for
from tests.e2e.test_engine_processes import engines_of
from tests.e2e.test_modes import metrics
from tests.ext.ray.clusters import (
    JOB,
    dies,
    ended,
    kill,
    left_behind,
    nobody_left,
    start,
    where,
)
from tests.tiny import make_model
from trireme.checkpoint.layout import JobFolder
from trireme.monitor.monitor import read_metrics

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow
LARGE = pytest.mark.large


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without places, and two nodes with one each."""
    equal = {"worker_niceness": 0}  # by default others who work on this machine come first
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": equal}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        add_nodes(made, 2)
        yield made
    finally:
        made.shutdown()


def add_nodes(cluster: Any, wanted: int) -> None:
    """Until there are so many nodes with a place."""
    while len(cluster.worker_nodes) < wanted:
        cluster.add_node(num_cpus=1)


def difference(job: Path, other: Path, step: int) -> float:
    """The largest of any weight between two jobs."""
    file = f"global_step_{step}/actor/huggingface/model.safetensors"
    ours, theirs = load_file(job / file), load_file(other / file)
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_two_engines_and_a_trainer_on_three_nodes_learn_what_one_process_does(
    tmp_path: Path, cluster: Any
) -> None:
    (tmp_path / "alone").mkdir()
    alone = run(tmp_path / "alone", small_config(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    asked = ("cluster.node_num=3", "cluster.gpu_per_node=1", "explorer.rollout_model.engine_num=2")
    relative = "model.model_path=model"  # to where the command was given, not `ray start`
    process = start(tmp_path, cluster, *asked, relative, "explorer.runner_per_model=2")
    log = tmp_path / JOB / "log/launcher.log"
    wait_for(log.exists, process)
    time.sleep(5)
    cluster.add_node(num_cpus=1)  # the run waits for its third place
    stdout, _ = ended(process)
    assert "waiting" in stdout and "accuracy" in stdout
    job = tmp_path / JOB
    trained = metrics(job, "trainer")
    assert len(trained) == 4 and len(metrics(job, "explorer")) == 4
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
    assert max(row["sync/probe_diff"] for row in trained) < 1e-4
    assert difference(job, tmp_path / "alone" / JOB, 4) < 1e-5
    names = {path.name for path in (tmp_path / "alone" / JOB / "log").iterdir()}
    assert names <= {path.name for path in (job / "log").iterdir()}
    assert not left_behind(tmp_path)


@LARGE
def test_recorded_experts_reach_a_trainer_on_another_node(tmp_path: Path, cluster: Any) -> None:
    add_nodes(cluster, 2)
    config = small_config(tmp_path)
    config["model"]["model_path"] = str(make_model(tmp_path / "mixture", "qwen3_moe", max_len=256))
    config["algorithm"]["enable_router_replay"] = True
    ended(start(tmp_path, cluster, config=config))
    trained = metrics(tmp_path / JOB, "trainer")
    assert [row["rollout/routing_recorded"] for row in trained] == [1.0] * 4
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4


@LARGE
@pytest.mark.parametrize("victim", ["actor", "process", "node"])
def test_an_engine_that_dies_is_made_anew_where_there_is_a_place_and_nothing_is_lost(
    tmp_path: Path, cluster: Any, victim: str
) -> None:
    """Killed while it generates: each of 12 x 4 x 4 rollouts is there once, by proved weights."""
    add_nodes(cluster, 3)
    config = small_config(tmp_path)
    config["model"]["max_response_tokens"] = 64
    store = {"name": "experience_buffer", "storage_type": "file"}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    asked = ("buffer.total_steps=12", "explorer.eval_interval=12")
    process = start(tmp_path, cluster, *asked, config=config)
    job = tmp_path / JOB
    log = job / "log/launcher.log"
    wait_for((job / "global_step_2/manifest.json").exists, process)
    pid, node = where(log, "engine_0")
    if victim == "node":
        [lost] = [n for n in cluster.list_all_nodes() if n.node_id == node]
        cluster.remove_node(lost, allow_graceful=False)
    else:
        kill(engines_of(pid)[0] if victim == "process" else pid)
    _, said = ended(process)
    reason = {
        "actor": f"process {pid} is gone",
        "process": "engine_0 has ended by signal 9",
        "node": r"its machine [\d.]+ is gone",
    }
    assert re.search(
        f"engine_0 has died: {reason[victim]}: it is started again \\(1 of 3\\)", said
    ), said
    other, place = where(log, "engine_0")
    assert other != pid and (place != node) == (victim == "node")
    made = [
        json.loads(line)
        for line in (job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    ]
    assert len({str(row["eid"]) for row in made}) == len(made) == 12 * 4 * 4
    trained = metrics(job, "trainer")
    assert [row["perf/experiences"] for row in trained] == [16.0] * 12
    assert sum(row["rollout/failed"] for row in metrics(job, "explorer")) == 0
    assert max(row["sync/probe_diff"] for row in trained) < 1e-4
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
    assert nobody_left(tmp_path)


@pytest.mark.parametrize(
    "victim",
    ["node", *(pytest.param(n, marks=LARGE) for n in ("engine_0", "trainer", "explorer"))],
)
def test_a_death_ends_the_run_with_one_sentence_and_nothing_stays_behind(
    tmp_path: Path, cluster: Any, victim: str
) -> None:
    endless = ("buffer.total_steps=5000", "explorer.eval_interval=5000")
    process = start(tmp_path, cluster, *endless, "cluster.engine_restarts=0")
    job = tmp_path / JOB
    figures = job / "monitor/metrics.jsonl"
    wait_for(lambda: figures.exists() and '"part": "trainer"' in figures.read_text(), process)
    part = "engine_0" if victim == "node" else victim
    pid, node = where(job / "log/launcher.log", part)
    if victim == "node":
        [lost] = [n for n in cluster.list_all_nodes() if n.node_id == node]
        dies(process, part, lambda: cluster.remove_node(lost, allow_graceful=False))
        add_nodes(cluster, 2)
    else:
        dies(process, part, lambda: kill(pid))
    assert nobody_left(tmp_path)


@LARGE
def test_sigterm_saves_what_was_learned_and_the_same_command_goes_on(
    tmp_path: Path, cluster: Any
) -> None:
    job = tmp_path / JOB
    process = start(
        tmp_path, cluster,
        "buffer.total_steps=5000", "explorer.eval_interval=5000", "trainer.save_interval=5000",
    )  # fmt: skip
    figures = job / "monitor/metrics.jsonl"
    wait_for(lambda: figures.exists() and '"part": "trainer"' in figures.read_text(), process)
    process.send_signal(signal.SIGTERM)
    _, stderr = ended(process, code=128 + signal.SIGTERM)
    [step] = JobFolder(job).steps()
    assert JobFolder(job).is_full(step)
    said = f"the checkpoint of step {step} is saved; the same command resumes from it"
    assert stderr.splitlines()[-1] == f"stopped by SIGTERM: {said}"
    assert "Traceback" not in stderr and nobody_left(tmp_path)
    stdout, _ = ended(start(tmp_path, cluster, f"buffer.total_steps={step + 1}"))
    assert "resuming from" in stdout
    learned = [row["step"] for row in read_metrics(figures) if row["part"] == "trainer"]
    assert learned == list(range(1, step + 2))


@LARGE
def test_what_was_killed_twice_ends_with_the_weights_of_a_run_in_one_process(
    tmp_path: Path, cluster: Any
) -> None:
    """First a trainer rank dies, then everything at once: the command and all its processes."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "ranks").mkdir()
    alone, job = tmp_path / "alone" / JOB, tmp_path / "ranks" / JOB
    asked = ("buffer.total_steps=8", "explorer.eval_interval=8")
    ranks = ("cluster.node_num=3", "cluster.gpu_per_node=1")

    def begin() -> Any:
        return start(tmp_path / "ranks", cluster, *asked, *ranks)

    add_nodes(cluster, 3)
    process = begin()
    done = run(tmp_path / "alone", small_config(tmp_path / "alone"), *asked)
    assert done.returncode == 0, done.stderr
    wait_for((job / "global_step_2/manifest.json").exists, process)
    pid, _ = where(job / "log/launcher.log", "trainer_rank_1")
    dies(process, "trainer_rank_1", lambda: kill(pid))
    assert nobody_left(tmp_path / "ranks")
    saved = JobFolder(job).steps()[-1]
    process = begin()
    wait_for(lambda: JobFolder(job).is_full(saved + 2), process)
    for pid in (process.pid, *left_behind(tmp_path / "ranks")):
        kill(pid)
    process.communicate()
    assert not (job / "global_step_8").exists()
    stdout, _ = ended(begin())
    assert "resuming from" in stdout
    assert nobody_left(tmp_path / "ranks")
    assert difference(job, alone, 8) < 1e-5
    for part, key in (("trainer", "perf/experiences"), ("explorer", "rollout/reward/mean")):
        ours, theirs = (
            {row["step"]: row["metrics"][key] for row in read_metrics(path) if row["part"] == part}
            for path in (job / "monitor/metrics.jsonl", alone / "monitor/metrics.jsonl")
        )
        assert ours == theirs and sorted(ours) == list(range(1, 9))


@LARGE
def test_two_explorers_feed_one_trainer_though_one_of_them_dies_and_comes_back(
    tmp_path: Path, cluster: Any
) -> None:
    config = small_config(tmp_path)
    config["buffer"] |= {"total_steps": 2, "train_batch_size": 16}
    store = {"storage_type": "sql", "name": "shared"}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    del config["buffer"]["explorer_input"]["eval_tasksets"]

    def begin(name: str, *words: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return start(tmp_path / name, cluster, *words, config=config)

    job, names = tmp_path / JOB, ("first", "second")
    first, second = (begin(name, "mode=explore", f"explorer.name={name}") for name in names)
    # one step each; for the next one they need weights of a trainer that is not here yet
    metas = [job / f"{name}_meta.json" for name in names]
    wait_for(lambda: all(meta.exists() for meta in metas), first, second)
    pid, _ = where(job / "log/second/launcher.log", "explorer")
    assert "log/second/explorer.log" in dies(second, "explorer", lambda: kill(pid))
    trainer = begin("trainer", "mode=train", "trainer.total_steps=99")
    second = begin("second", "mode=explore", "explorer.name=second")
    for name, process in (("first", first), ("second", second)):
        assert f"{name} has explored 2 steps" in ended(process)[0]
    ended(trainer)
    with sqlite3.connect(job / "buffer/shared.db") as database:
        rows = database.execute(
            "select source, msg_id, response_text, model_version, consumed from shared"
        ).fetchall()
    sources = [row[0] for row in rows]
    assert {source: sources.count(source) for source in sources} == {
        f"{step}/{name}": 16 for step in (1, 2) for name in names
    }
    assert len({row[1] for row in rows}) == 64 and {row[4] for row in rows} == {1}
    # equal tasks and equal weights, but replies of their own
    at_first = [row[2] for row in rows if row[0].startswith("1/")]
    assert len(set(at_first)) > 24
    assert {row[3] == 0 for row in rows if row[0].startswith("2/")} == {False}
    assert sum(row["perf/experiences"] for row in metrics(job, "trainer")) == 64
    for name in names:
        assert len(metrics(job, "explorer", name)) == 2
        assert (job / "log" / name / "engine_0.log").exists()
    assert nobody_left(tmp_path)


@LARGE
@pytest.mark.parametrize("killed", ["its server", "all of it"])
def test_a_head_that_is_killed_ends_the_run_with_one_sentence(tmp_path: Path, killed: str) -> None:
    made: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        process = start(tmp_path, made, "cluster.gpu_per_node=2", "buffer.total_steps=4000")
        wait_for((tmp_path / JOB / "global_step_2").exists, process)
        if killed == "its server":
            made.head_node.kill_gcs_server()
        else:
            made.remove_node(made.head_node, allow_graceful=False)
        _, stderr = ended(process, code=1)
    finally:
        made.shutdown()
    [error] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: the head of the Ray cluster at [\d.]+:\d+ does not answer any more: .* and give "
        "the same command: it resumes from the last checkpoint",
        error,
    )
    assert "rpc_client" not in stderr and "Traceback" not in stderr


def test_a_cluster_that_does_not_answer_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, small_config(tmp_path), "cluster.ray_address=127.0.0.1:1")
    assert done.returncode == 1
    assert "the Ray cluster at 127.0.0.1:1 (cluster.ray_address) does not answer" in done.stderr
