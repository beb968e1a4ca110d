"""Environments: how many steps a second do they make, with 1, 8 and 32 episodes at once?

    OMP_NUM_THREADS=1 python benchmarks/environments.py        # needs trireme-rl[envs]

WebShop (1,000 products of our own) and the household run in this process, ALFWorld (24 games of our
own) on two worker processes. The floor for WebShop is the original's 68 steps a second, as measured
in its own environment on two cores: the target is 100 times that. Exits 1 when it is missed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from trireme.ext.alfworld.make_games import make_games
from trireme.ext.environments.household import Household, Layout, clumsy_action
from trireme.ext.environments.pool import EnvPool
from trireme.ext.webshop.env import Shop, WebShopEnv, open_shop
from trireme.ext.webshop.make_catalogue import make_catalogue

ORIGINAL, TARGET = 68.0, 100.0
PARALLEL = (1, 8, 32)
Episode = Callable[[int], Awaitable[int]]


async def shop_episode(shop: Shop, number: int) -> int:
    """One customer; the number of steps."""
    env = WebShopEnv(shop, session_prefix=f"{number} ")
    env.reset(session=number % len(shop.goals))
    words = env.instruction_text.split()
    for name in (f"search[{' '.join(words[6:12])}]", "click[next >]", "click[< prev]"):
        env.step(name)
    env.step(f"click[{env.get_available_actions()['clickables'][2]}]")
    for name in ("click[description]", "click[< prev]", "click[buy now]"):
        env.step(name)
        env.get_available_actions()
    return 7


async def household_episode(number: int) -> int:
    """One clumsy episode."""
    env, source = Household(Layout.numbered(number)), random.Random(number)
    for step in range(10):
        if env.step(clumsy_action(env, source, clumsiness=0.25))[2]:
            return step + 1
    return 10


async def alfworld_episode(pool: EnvPool, files: list[Path], number: int) -> int:
    """Ten random possible actions in one game; the games of a group follow each other."""
    file, source = str(files[number // 8 % len(files)]), random.Random(number)
    async with pool.lend(key=file, game_file=file) as env:
        _, info = await env.reset()
        for _ in range(10):
            *_, info = await env.step(source.choice(info["admissible_commands"]))
    return 10


async def speed(episode: Episode, parallel: int, episodes: int) -> float:
    """Steps a second over so many episodes, `parallel` of them at once."""
    left = iter(range(episodes))
    done = 0

    async def one_after_the_other() -> None:
        nonlocal done
        for number in left:
            steps = await episode(number)
            done += steps  # not in one go: others add while this waits

    started = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(parallel)))
    return done / (time.perf_counter() - started)


def main() -> int:
    """One line an environment."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_catalogue(folder / "shop", 1000, 0)
        shop = open_shop(str(folder / "shop"))
        assert shop.search
        files = make_games(folder / "games", "train", 24, 0)
        pool = EnvPool("trireme.ext.alfworld.game:Game", workers=2, timeout_s=120)
        rows: list[tuple[str, Episode, int]] = [
            ("webshop", lambda n: shop_episode(shop, n), 1500),
            ("household", household_episode, 3000),
            ("alfworld", lambda n: alfworld_episode(pool, files, n), 96),
        ]
        print("environment " + "".join(f"{f'{n} at once':>12}" for n in PARALLEL) + "   steps/s")
        found = {}
        for title, episode, count in rows:
            found[title] = [asyncio.run(speed(episode, n, count)) for n in PARALLEL]
            print(f"{title:12}" + "".join(f"{value:12,.0f}" for value in found[title]), flush=True)
        pool.close()
        lost = pool.counts["lent"] - sum(v for k, v in pool.counts.items() if k != "lent")
        print(f"alfworld episodes: {pool.counts}, unaccounted for: {lost}")
    ratio = min(found["webshop"]) / ORIGINAL
    print(f"webshop: {ratio:.0f} times the original's {ORIGINAL:.0f} steps/s, wanted {TARGET:.0f}")
    return int(ratio < TARGET or lost != 0)


if __name__ == "__main__":
    sys.exit(main())
