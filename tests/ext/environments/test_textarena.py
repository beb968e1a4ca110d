"""Games of the real textarena for one player."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

pytest.importorskip("textarena", reason="textarena is not installed: make test-extras")

from tests.model.fake import make
from trireme.ext.environments.gyms import ArenaGame
from trireme.task import Task
from trireme.workflows.workflow import resolve

GUESS = "GuessTheNumber-v0"


def search(seed: int) -> list[str]:
    """The guesses of a binary search, to the end."""
    game, low, high, guesses = ArenaGame(GUESS, seed=seed), 1, 20, []
    assert "between 1 and 20" in game.reset()[0]
    while True:
        guesses.append(f"[{(low + high) // 2}]")
        seen, reward, done, _ = game.step(guesses[-1])
        if done:
            assert reward == 1.0
            return guesses
        assert re.fullmatch(r"The target number is (lower|higher)\.", seen)
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in seen else (low, middle - 1)


def test_an_episode_is_that_of_its_seed() -> None:
    assert search(1) == search(1)
    assert len({search(seed)[-1] for seed in range(5)}) > 1


def test_games_side_by_side_leave_each_others_chance_and_pythons_alone() -> None:
    def first_board(game: ArenaGame) -> str:
        return game.reset()[0] + game.step("[up]")[0] + game.step("[left]")[0]

    alone = [first_board(ArenaGame("2048-v0", seed=seed)) for seed in (1, 2)]
    random.seed(0)
    before = random.getstate()
    one, two = ArenaGame("2048-v0", seed=1), ArenaGame("2048-v0", seed=2)
    seen = [one.reset()[0], two.reset()[0]]
    for action in ("[up]", "[left]"):
        seen = [text + g.step(action)[0] for text, g in zip(seen, (one, two), strict=True)]
    assert seen == alone and alone[0] != alone[1]
    assert random.getstate() == before


def test_what_is_no_move_is_said_and_the_second_time_ends_the_game() -> None:
    game = ArenaGame("FrozenLake-v0", seed=1)
    game.reset()
    seen, _, done, _ = game.step("swim")
    assert "Invalid action format" in seen and not done
    _, reward, done, info = game.step("swim")
    assert done and reward == 0.0 and info["invalid_move"]


def test_the_workflow_plays_the_game_of_the_tasks_seed() -> None:
    guesses = search(3)

    async def main() -> list:
        task = Task({"prompt": 3}, workflow_args={"env_id": GUESS})
        replies = make([f"I say <action>{guess}</action>" for guess in guesses])
        return await resolve("textarena_workflow").call(task, replies, 1, 0)

    (e,) = asyncio.run(main())
    assert e.reward == 1.0 and e.metrics["actual_env_steps"] == len(guesses)


def test_a_refusal_without_a_reward_is_worth_nothing() -> None:
    game = ArenaGame("ThreeCardMonte-v0", seed=1)
    game.reset()
    game.step("[nine]")
    _, reward, done, _ = game.step("[nine]")
    assert done and reward == 0.0


def test_a_game_that_there_is_not_is_said() -> None:
    with pytest.raises(ValueError, match="GuessTheWord-v9"):
        ArenaGame("GuessTheWord-v9", seed=0)
