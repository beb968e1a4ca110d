"""Runs on a Ray cluster of several nodes: the same result as in one process, and every death seen.

Nodes are processes of this machine; each has a CPU as its one place.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.job import command, environment, run, small_config
from tests.e2e.test_modes import metrics

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
JOB = "checkpoints/tests/job"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without places, and two nodes with one each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


def start(folder: Path, cluster: Any, *overrides: str) -> subprocess.Popen[str]:
    """`trireme run` of the small job on the cluster."""
    words = command(
        folder, small_config(folder), f"cluster.ray_address={cluster.address}", *overrides
    )
    return subprocess.Popen(
        words, env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def wait_for(what: Callable[[], Any], seconds: float, process: subprocess.Popen[str]) -> Any:
    """What `what` finds, once it finds something."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError("\n".join(map(str, process.communicate())))
        time.sleep(0.2)
    return found


def left_behind(folder: Path) -> list[int]:
    """Processes of a run in this folder, told by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_two_engines_and_a_trainer_on_three_nodes_learn_what_one_process_does(
    tmp_path: Path, cluster: Any
) -> None:
    (tmp_path / "alone").mkdir()
    alone = run(tmp_path / "alone", small_config(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    asked = ("cluster.node_num=3", "cluster.gpu_per_node=1", "explorer.rollout_model.engine_num=2")
    process = start(tmp_path, cluster, *asked, "explorer.runner_per_model=2")
    log = tmp_path / JOB / "log/launcher.log"
    wait_for(log.exists, 60, process)
    time.sleep(5)
    cluster.add_node(num_cpus=1)  # the run waits for its third place
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stdout + stderr
    assert "waiting" in stdout and "accuracy" in stdout
    job = tmp_path / JOB
    trained = metrics(job, "trainer")
    assert len(trained) == 4 and len(metrics(job, "explorer")) == 4
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
    assert max(row["sync/probe_diff"] for row in trained) < 1e-4
    ours, theirs = (
        load_file(root / JOB / "global_step_4/actor/huggingface/model.safetensors")
        for root in (tmp_path, tmp_path / "alone")
    )
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    names = {path.name for path in (tmp_path / "alone" / JOB / "log").iterdir()}
    assert names <= {path.name for path in (job / "log").iterdir()}
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("victim", ["node", "engine_0", "coordinator"])
def test_a_death_ends_the_run_with_one_sentence_and_nothing_stays_behind(
    tmp_path: Path, cluster: Any, victim: str
) -> None:
    process = start(tmp_path, cluster, "buffer.total_steps=5000", "explorer.eval_interval=5000")
    job = tmp_path / JOB
    figures = job / "monitor/metrics.jsonl"
    wait_for(lambda: figures.exists() and '"part": "trainer"' in figures.read_text(), 300, process)
    log = (job / "log/launcher.log").read_text()
    part = "engine_0" if victim == "node" else victim
    found = re.search(rf"{part}: process (\d+) on node (\w+)", log)
    assert found is not None
    died = time.monotonic()
    if victim == "node":
        [node] = [n for n in cluster.list_all_nodes() if n.node_id == found[2]]
        cluster.remove_node(node, allow_graceful=False)
    else:
        os.kill(int(found[1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert time.monotonic() - died < 60
    assert process.returncode == 1
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    reason = r"its machine [\d.]+ is lost|process \d+ is gone"
    sentence = rf"error: {part} has died: ({reason}); its log is \S+\.log.*"
    assert len(errors) == 1 and re.fullmatch(sentence, errors[0]), stderr
    deadline = time.monotonic() + 20
    while left_behind(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left_behind(tmp_path)


def test_a_cluster_that_does_not_answer_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, small_config(tmp_path), "cluster.ray_address=127.0.0.1:1")
    assert done.returncode == 1
    assert "the Ray cluster at 127.0.0.1:1 (cluster.ray_address) does not answer" in done.stderr
