"""A server, a trainer and an agent as three processes: what was committed is trained once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.job import environment, small_config
from tests.e2e.test_modes import metrics
from tests.e2e.test_two_commands import Pair
from tests.ext.http import bad
from tests.limits import HANG_S

AGENT = Path(__file__).with_name("agent.py")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A server and a trainer, started."""
    config = small_config(tmp_path)
    config["buffer"] |= {"train_batch_size": 16, "total_steps": 100}
    config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "shared"}}
    config["explorer"] |= {"proxy_port": 0, "service_status_check_interval": 0.1}
    pair = Pair(tmp_path, config)
    for mode in ("serve", "train"):
        pair.start(mode)
    yield pair
    for process in pair.running.values():
        process.kill()


def play(pair: Pair, first: int, last: int) -> None:
    """The agent's rounds."""
    words = [sys.executable, str(AGENT), str(pair.job / "explorer_server_url.txt")]
    done = subprocess.run(
        [*words, str(first), str(last)],
        env=environment(), capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def refuse_all(pair: Pair) -> None:
    """Requests that ended an engine, or could: refused, and the server's run goes on."""
    url = (pair.job / "explorer_server_url.txt").read_text()
    with httpx.Client(base_url=url, timeout=HANG_S) as client:
        for path, body in bad.agents_requests()[::3]:
            bad.refused(client.post(path, json=body))
        assert client.get("/health").status_code == 200
    assert pair.running["serve"].poll() is None


def test_what_is_committed_is_trained_once_and_later_replies_come_from_newer_weights(
    pair: Pair,
) -> None:
    play(pair, 1, 2)
    pair.running["serve"].kill()
    assert len(pair.rows()) == 32, "a commit answers when the store has it"
    (pair.job / "explorer_server_url.txt").unlink()
    pair.start("serve")
    play(pair, 3, 3)
    refuse_all(pair)
    play(pair, 4, 4)
    pair.running["serve"].send_signal(signal.SIGTERM)
    pair.finish()  # the trainer takes the rest, half a batch, and ends as well
    rows = pair.rows()
    assert {(consumed, claimed) for *_, consumed, claimed in rows} == {(1, None)}
    assert len({eid for eid, *_ in rows}) == len(rows) == 56
    assert {(batch, version) for _, batch, version, *_ in rows} == {(i, i - 1) for i in range(1, 5)}
    runs = {(batch, eid.rsplit("/", 2)[-2]) for eid, batch, *_ in rows}
    assert runs == {(batch, str(run)) for batch in range(1, 5) for run in range(4)}
    assert not (pair.job / "explorer_server_url.txt").exists()
    trained = metrics(pair.job, "trainer")
    assert [row["perf/experiences"] for row in trained] == [16, 16, 16, 8]
    assert max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
