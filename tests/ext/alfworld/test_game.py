"""The real engine on our own games: solvable, the same with caches, and played by the workflow."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S

pytest.importorskip("textworld", reason="ALFWorld is not installed: make test-extras runs these")

from tests.model.fake import make
from trireme.ext.alfworld.game import Game
from trireme.ext.alfworld.make_games import TASKS, make_games
from trireme.ext.environments.pool import EnvError, EnvPool
from trireme.task import Task
from trireme.workflows.workflow import resolve

FACTORY = "trireme.ext.alfworld.game:Game"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_games(tmp_path_factory.mktemp("alfworld"), "train", 12, seed=3)


def solve(env: Any) -> tuple[list[str], bool]:
    """Follow the expert; the actions, and whether the task was done."""
    _, info = env.reset()
    actions: list[str] = []
    while len(actions) < 60:
        actions.append(info["expert_plan"][0])
        _, reward, done, info = env.step(actions[-1])
        if done:
            return actions, info["won"] and reward == 1.0
    return actions, False


def test_games_of_all_six_types_are_solved_by_the_expert_in_worker_processes(
    files: list[Path],
) -> None:
    pool = EnvPool(FACTORY, workers=2, timeout_s=HANG_S)
    try:
        tasks = set()
        for file in files:
            with pool.lend_blocking(key=str(file), game_file=str(file), expert=True) as env:
                actions, done = solve(env)
            assert done, f"{file}: {actions}"
            tasks.add(json.loads((file.parent / "traj_data.json").read_text())["task_type"])
        assert tasks == set(TASKS)
        assert pool.counts["ended"] == len(files)
    finally:
        pool.close()


TRACE = """
import json, sys
from trireme.ext.alfworld.game import Game
for file in sys.argv[2:]:
    game = Game(file, caches=sys.argv[1] == "cached")
    for _ in range(2):
        seen = [game.reset()]
        for action in ["look", "inventory", "fly", *seen[0][1]["admissible_commands"]]:
            seen.append(game.step(action))
        print(json.dumps(seen, default=str))
"""


def test_caches_change_no_word(files: list[Path]) -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACE, how, *map(str, files[:3])],
            capture_output=True, text=True, check=True,
        ).stdout
        for how in ("cached", "plain")
    ]  # fmt: skip
    assert traces[0] == traces[1] and traces[0].count("\n") == 6
    assert "Nothing happens." in traces[0]


COPIES = """
import sys
from trireme.ext.alfworld.game import Game
for file in sys.argv[1:]:
    game = Game(file)
    for _ in range(2):
        game.reset()
    game.close()
copies = {line.split(maxsplit=5)[5] for line in open("/proc/self/maps") if "libdownward" in line}
print(len(copies))
"""


def test_closed_games_leave_their_planner_to_the_next(files: list[Path]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", COPIES, *map(str, files)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert int(found) == 1


def test_splits_share_no_game_and_unseen_rooms_have_other_furniture(tmp_path: Path) -> None:
    texts = {
        split: [file.read_text() for file in make_games(tmp_path, split, 12, seed=0)]
        for split in ("train", "valid_seen", "valid_unseen")
    }
    assert len({text for made in texts.values() for text in made}) == 36
    assert not any("CounterTop" in text for text in texts["valid_unseen"])
    assert any("CounterTop" in text for text in texts["train"])
    again = make_games(tmp_path / "again", "train", 12, seed=0)
    assert [file.read_text() for file in again] == texts["train"]


def test_a_file_that_is_no_game_is_named_by_the_pool(tmp_path: Path) -> None:
    pool = EnvPool(FACTORY, workers=1, timeout_s=HANG_S)
    try:
        missing = str(tmp_path / "game.tw-pddl")
        with (
            pool.lend_blocking(game_file=missing) as env,
            pytest.raises(EnvError, match="there is no such file"),
        ):
            env.reset()
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["alfworld_workflow", "step_wise_alfworld_workflow"])
def test_the_workflow_plays_a_game_to_its_end(name: str, files: list[Path]) -> None:
    actions, _ = solve(Game(str(files[0]), expert=True))
    replies = iter([f"<think>so</think>\n<action>{action}</action>" for action in actions])
    spec = resolve(name)

    async def main() -> Any:
        model, task = make(replies, max_model_len=8192), Task({"prompt": str(files[0])})
        if spec.blocking:
            return await asyncio.to_thread(spec.call, task, model.blocking(), 1, 0)
        return await spec.call(task, model, 1, 0)

    found = asyncio.run(main())
    assert all(e.reward == 1.0 for e in found)
    assert len(found) == (len(actions) if "step_wise" in name else 1)
    assert found[0].metrics["actual_env_steps"] == len(actions)
    assert found[0].metrics["env_done"] == 1.0
    messages = found[-1].messages or []
    assert messages[0]["role"] == "system"
    assert messages[1]["content"].startswith("Observation: -= Welcome to TextWorld, ALFRED! =-")
