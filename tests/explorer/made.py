"""What explorer tests share: real models on a scripted engine, tasks, runners and an explorer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.data.made import taskset_of
from tests.limits import HANG_S
from tests.tiny import make_tokenizer
from trireme.buffer.queue import QueueBuffer
from trireme.data.rows import Rows
from trireme.data.tasksets import Taskset
from trireme.engines.engine import Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.experience import Experience
from trireme.explorer.explorer import Explorer, ExplorerSettings
from trireme.explorer.runner import Key, Runner, TimeLimit
from trireme.explorer.scheduler import Scheduler
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.monitor.events import Evaluated, Event, RolloutDone, StepDone
from trireme.pipeline.pipeline import Pipeline
from trireme.registry import ALGORITHMS
from trireme.task import Task

T = TypeVar("T")
TOKENIZER: Any = make_tokenizer()
CHAT = ChatTokens(TOKENIZER)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; a hang fails it."""
    return asyncio.run(asyncio.wait_for(coroutine, HANG_S))


def scripted(replies: Any = lambda prompt: "42") -> ScriptedEngine:
    return ScriptedEngine(replies, tokenizer=TOKENIZER)


class BrokenEngine(ScriptedEngine):
    """Fails at its first request, and says so from then on."""

    def __init__(self) -> None:
        super().__init__([], tokenizer=TOKENIZER)
        self.broken = False

    async def generate(self, ids: Any, sampling: Sampling, *, key: Any = ()) -> Any:
        self.broken = True
        self.health()

    def health(self) -> Any:
        if self.broken:
            raise RuntimeError("the engine has failed: out of memory")
        return super().health()


async def ask(task: Task, model: Model) -> list[Experience]:
    """One question, rewarded where the answer is the task's."""
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=float(reply.text == task.truth))


def task(
    workflow: Any = ask, *, task_id: int = 0, repeat_times: int = 1, batch_id: int | str = 1
) -> Task:
    row = {"prompt": "6 x 7?", "response": "42"}
    own = {"workflow": workflow, "repeat_times": repeat_times}
    return Task(row, **own, task_id=task_id, batch_id=batch_id, index={"index": task_id})


class Models:
    """A factory of models that remembers them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.made: list[Model] = []

    def __call__(self, task: Task, key: Key) -> Model:
        sampling = Sampling(max_tokens=16)
        model = Model(self.engine, CHAT, key=key, sampling=sampling, max_model_len=512)
        self.made.append(model)
        return model


def make_runner(engine: Any = None, models: Any = None, **options: Any) -> Runner:
    engine = engine or scripted()
    options = {"max_retries": 0} | options
    limit = options.pop("limit", None) or TimeLimit(options.pop("max_timeout", HANG_S))
    return Runner(models or Models(engine), engine, limit=limit, **options)


def make_taskset(
    workflow: Any = ask, *, rows: int = 8, name: str = "sums", is_eval: bool = False, **options: Any
) -> Taskset:
    data = [{"prompt": f"{i} + 1?", "response": str(i + 1)} for i in range(rows)]
    options = {"batch_size": 2, "repeat_times": 2} | options
    return taskset_of(
        Rows(name, data, ["prompt", "response"]),
        name=name,
        workflow=workflow,
        is_eval=is_eval,
        **options,
    )


class Sync:
    """An explorer's side with a border after every `interval` steps; `at_pull(step)` looks."""

    def __init__(
        self,
        interval: int = 1,
        at_pull: Callable[[int], None] = lambda step: None,
        pushes_by_itself: bool = False,
    ):
        self.interval = interval
        self.pushes_by_itself = pushes_by_itself
        self.at_pull = at_pull
        self.finished = False

    def due(self, step: int) -> bool:
        return not self.pushes_by_itself and step % self.interval == 0

    async def pull(self, step: int) -> None:
        self.at_pull(step)

    def metrics(self) -> dict[str, float]:
        return {"sync/version": 0}


def make_explorer(
    *,
    workflow: Any = ask,
    engine: Any = None,
    taskset: Taskset | None = None,
    evaluations: Sequence[Taskset] = (),
    sync: Any = None,
    runners: int = 2,
    runner_options: dict[str, Any] | None = None,
    **options: Any,
) -> SimpleNamespace:
    """An explorer with its `engine`, `buffer`, `reports` as (part, step, metrics), and the rollouts
    that were `shown`.
    """
    engine = engine or scripted()
    buffer = options.pop("buffer", QueueBuffer("store"))
    reports: list[tuple[str, int, dict[str, float]]] = []
    shown: list[Any] = []

    def emit(event: Event) -> None:
        if isinstance(event, StepDone | Evaluated):
            reports.append((event.part, event.step, dict(event.metrics)))
        if isinstance(event, RolloutDone):
            shown.append(event.experience)

    made = [make_runner(engine, **(runner_options or {})) for _ in range(runners)]
    names = [field.name for field in fields(ExplorerSettings)]
    settings = ExplorerSettings(**{name: options.pop(name) for name in names if name in options})
    explorer = Explorer(
        taskset=taskset or make_taskset(workflow),
        eval_tasksets=evaluations,
        scheduler=Scheduler(made, max_repeats_per_runner=None),
        pipeline=Pipeline(ALGORITHMS.get("grpo")),
        buffer=buffer,
        sync=sync or Sync(),
        settings=settings,
        emit=emit,
        **options,
    )
    return SimpleNamespace(
        explorer=explorer, engine=engine, buffer=buffer, reports=reports, shown=shown
    )
