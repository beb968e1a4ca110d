"""Agent programs that nobody here wrote, as they come: what they sample is what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.agents.programs import EXAMPLES, PROGRAMS, Program
from tests.agents.steered import MAX_LEN, ROOT, Steered, exactness, make_model
from tests.ext.vllm.host import vllm_host
from tests.limits import HANG_S
from tests.vllm import START_S, needs_vllm
from trireme.engines.device import Device
from trireme.engines.engine import Engine, Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.explorer.runner import Outcome, Runner, TimeLimit
from trireme.ext.http.gateway import Gateway
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import start_all, stop_all
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.task import Task
from trireme.workflows.workflow import resolve

QUESTION = "What is 6 times 7?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("agents") / "model")


def one(task: Task, answer: str) -> float:
    return 1.0


@asynccontextmanager
async def embedded(model: Path) -> AsyncIterator[tuple[Engine, int]]:
    """The torch engine, and the most tokens of a conversation."""
    device = Device(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = TorchEngine(
        model,
        tokenizer=tokenizer,
        device=device,
        settings=TorchSettings(max_model_len=MAX_LEN, seed=1),
    )
    try:
        yield engine, MAX_LEN
    finally:
        await engine.close()
        device.close()


@asynccontextmanager
async def vllm(model: Path) -> AsyncIterator[tuple[Engine, int]]:
    """vLLM's, in a process of its own."""
    host = vllm_host(model, max_model_len=4096)
    await start_all([host], START_S)
    engine = RemoteEngine([host.url], api_key=host.key)
    try:
        yield engine, 4096
    finally:
        await engine.close()
        await stop_all([host])


Engines = Callable[[Path], AbstractAsyncContextManager[tuple[Engine, int]]]


async def play(
    program: Program, model: Path, folder: Path, engines: Engines
) -> tuple[Outcome, Steered]:
    """One rollout of a program, as a run has it."""
    command = {"command": program.command, "cwd": "{workdir}", "env": program.variables}
    args = {**command, "keep": str(folder)}
    row = {"prompt": QUESTION, "response": "42"}
    task = Task(row, workflow="command_workflow", workflow_args=args, reward_fn=one)
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = ChatTokens(tokenizer)
    async with engines(model) as (own, most):
        steered = Steered(own, tokenizer, program.script())
        engine: Any = steered
        gateway = Gateway(Rollouts(engine, chat, "any", most))

        def make(task: Task, key: tuple[Any, ...]) -> Model:
            options: dict[str, Any] = {"max_model_len": most, "gateway": gateway.address}
            return Model(engine, chat, key=key, sampling=Sampling(max_tokens=512), **options)

        runner = Runner(make, engine, limit=TimeLimit(HANG_S), max_retries=0)
        try:
            return await runner.run(task, resolve("command_workflow"), range(1)), steered
        finally:
            await gateway.close()


def scripted(
    folder: Path, task: Task, replies: list[str | None], judge: str = "", **limits: Any
) -> tuple[Outcome, Steered]:
    """One rollout of a task within this process, whose first replies are given; `judge` is all
    that its auxiliary model says.
    """

    async def main() -> tuple[Outcome, Steered]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chat = ChatTokens(tokenizer)
        async with embedded(folder) as (own, most):
            engine: Any = Steered(own, tokenizer, lambda _: replies.pop(0) if replies else None)

            def make(task: Task, key: tuple[Any, ...]) -> Model:
                options = {"engine": engine, "chat": chat, "max_model_len": most} | limits
                options["sampling"] = Sampling(max_tokens=256)
                if judge:
                    other: Any = Steered(own, tokenizer, lambda _: judge)
                    options["auxiliary"] = [Model(key=("judge",), **options | {"engine": other})]
                return Model(key=key, **options)

            runner = Runner(make, engine, limit=TimeLimit(HANG_S), max_retries=0)
            spec = resolve(task.workflow)
            assert spec.examine is not None
            spec.examine(task)
            return await runner.run(task, spec, range(1)), engine

    return asyncio.run(main())


ROUNDS = [pytest.param(program, embedded, id=program.name) for program in PROGRAMS] + [
    pytest.param(PROGRAMS[2], vllm, id="vllm", marks=needs_vllm)
]


@pytest.mark.parametrize(("program", "engines"), ROUNDS)
def test_what_a_program_samples_is_what_is_trained(
    program: Program, engines: Engines, model: Path, tmp_path: Path
) -> None:
    if not program.installed:
        pytest.skip("make test-agents installs the agent programs")
    outcome, engine = asyncio.run(play(program, model, tmp_path, engines))
    assert not outcome.failures, outcome.failures[0]
    if program.left is not None:
        [made] = tmp_path.glob(f"*/{program.left}")
        assert made.read_text() == "42\n"
    else:  # what its tool said came back
        assert "42" in engine.prompts[-1]
    found = exactness(outcome.experiences, engine.sampled, model)
    row = (program.package, program.version, program.protocol, found.calls, found.sampled)
    print("\n| " + " | ".join(map(str, row)) + f" | {found.trained} | {found.drift:.1e} |")
    assert found.calls >= len(program.replies) and found.drift < 1e-4


def test_the_page_shows_the_programs_as_they_are() -> None:
    page = (ROOT / "docs/agent_programs.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("with_*.py"):
        _, _, code = path.read_text(encoding="utf-8").partition("\n\n")
        assert code.strip() in page, f"docs/agent_programs.md does not show {path.name} as it is"
