"""Plays a task whose workflow's program asks a fake engine over HTTP, at an address of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tests.model.fake import FakeEngine
from trireme import Task
from trireme.explorer.runner import Outcome, Runner, TimeLimit
from trireme.ext.http.gateway import Gateway
from trireme.ext.http.rollouts import Rollouts
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.workflows.workflow import resolve


def played(
    task: Task, reply: Callable[[str], str], runs: Sequence[int], *, limit: float, retries: int = 0
) -> Outcome:
    """The outcome of these runs; the task is examined first."""

    async def main() -> Outcome:
        engine: Any = FakeEngine(reply)
        chat = ChatTokens(engine.tokenizer)
        gateway = Gateway(Rollouts(engine, chat, "fake", 4000))

        def make(task: Task, key: tuple[Any, ...]) -> Model:
            return Model(engine, chat, key=key, max_model_len=4000, gateway=gateway.address)

        runner = Runner(make, engine, limit=TimeLimit(limit), max_retries=retries)
        spec = resolve(task.workflow)
        if spec.examine is not None:
            spec.examine(task)
        try:
            return await runner.run(task, spec, runs)
        finally:
            assert not gateway._models  # no address outlives its rollout
            await gateway.close()

    return asyncio.run(main())
