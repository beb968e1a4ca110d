"""Parked replies: what the engine stores of finished rollouts whose rows share their prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.explorer.made import make_runner
from tests.explorer.test_with_torch_engine import Longer, single_turn, with_engine
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.workflows.workflow import resolve


def test_the_engine_stores_no_replies_that_no_prompt_continues(tiny_dir: Path) -> None:
    """Of rollouts that ask once it stores each group's prompt, for prompts that begin like it."""

    def stored(barred: bool) -> tuple[list[tuple[int, ...]], list[int], int]:
        async def main(engine: TorchEngine, barrier: RolloutBarrier) -> tuple[Any, ...]:
            runner = make_runner(engine, Longer(engine), barrier=barrier if barred else None)
            one = single_turn(lambda task, answer: 1.0, 0, repeats=4)
            outcome = await runner.run(one, resolve("simple_workflow"), [0, 1, 2, 3])
            e = outcome.experiences[0]
            prompt = e.tokens[: e.prompt_length].tolist()
            entries = [entry.ids for entry in engine._decoder.prefixes._entries.values()]
            before = engine.health().cached_tokens
            await engine.generate([*prompt, 3], Sampling(max_tokens=1))
            return entries, prompt, engine.health().cached_tokens - before

        return with_engine(tiny_dir, main)

    entries, prompt, found = stored(barred=True)
    assert entries == [tuple(prompt[:-1])] and found == len(prompt) - 1
    entries, prompt, found = stored(barred=False)
    assert len(entries) == 4 and all(len(ids) > len(prompt) for ids in entries)
