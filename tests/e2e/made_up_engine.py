"""A plug-in with a kind of engine and a weight push of its own, which note what they do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trireme.config import Problem
from trireme.config.engine_kind import KEY, EngineChoice, EngineRequest, Interpreter
from trireme.registry import PUSHES, engine

OPTIONS = ("noted_in", "embedded")
NOTED: list[Path] = []


def note(text: str) -> None:
    with NOTED[0].open("a") as file:
        file.write(f"{text}\n")


@PUSHES.register("dreamt")
class DreamtPush:
    """See WeightPush: through memory."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def of(cls, parts: Any) -> DreamtPush:
        from trireme.sync.push import MemorySync

        return cls(MemorySync.of(parts))

    async def push(self, version: int) -> dict[str, float]:
        note(f"pushed {version}")
        return await self.inner.push(version)

    async def give(self, version: int) -> None:
        await self.inner.give(version)


@engine("made_up")
class MadeUpKind:
    """See EngineKind. `extra_engine_args`: the file, and whether the engine is embedded."""

    name = "made_up"
    keys = ("extra_engine_args",)
    sizes = ()
    own_python = False
    sees_with = None
    reports_experts = False

    def examine(self, request: EngineRequest) -> EngineChoice:
        model = request.config.explorer.rollout_model
        hosts = 0 if model.extra_engine_args.get("embedded") else model.engine_num
        unknown = [name for name in model.extra_engine_args if name not in OPTIONS]
        return EngineChoice(
            "made_up",
            hosts=hosts,
            shares=False,
            notes=[f"{KEY}.engine_type (made_up): it dreams on {request.gpus} GPUs"],
            problems=[
                Problem(f"{KEY}.extra_engine_args.{name}", "is no argument of a dream")
                for name in unknown
            ],
        )

    def interpreter(self, asked: str | None) -> Interpreter:
        return Interpreter(asked or sys.executable, "a dream")

    def options(self, plan: Any) -> dict[str, Any]:
        return dict(plan.config.explorer.rollout_model.extra_engine_args)

    async def make(
        self, spec: Any, tokenizer: Any, device: Any, *, barrier: Any = None, share_with: Any = None
    ) -> Any:
        from trireme.engines.engine import EngineTraits
        from trireme.engines.make import make_torch_engine

        NOTED.append(Path(spec.options["noted_in"]))
        here = not sys.argv[0].endswith("http/process.py")
        note("here" if here else "in a process")
        made = make_torch_engine(spec, tokenizer, device, barrier=barrier, share_with=share_with)
        made.traits = EngineTraits({"memory": "dreamt"})
        return made
