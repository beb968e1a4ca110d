"""A plug-in with a kind of engine of its own, which notes in a file where its engines were made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trireme.config import Problem
from trireme.config.engine_kind import KEY, EngineChoice, EngineRequest, Interpreter
from trireme.registry import engine

OPTIONS = ("noted_in", "embedded")


@engine("made_up")
class MadeUpKind:
    """See EngineKind. `extra_engine_args`: the file, and whether the engine is embedded."""

    name = "made_up"
    keys = ("extra_engine_args",)
    sizes = ()
    own_python = False

    def examine(self, request: EngineRequest) -> EngineChoice:
        model = request.config.explorer.rollout_model
        hosts = 0 if model.extra_engine_args.get("embedded") else model.engine_num
        unknown = [name for name in model.extra_engine_args if name not in OPTIONS]
        return EngineChoice(
            "made_up",
            hosts=hosts,
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
        from trireme.engines.make import make_torch_engine

        here = "in a process" if sys.argv[0].endswith("server/process.py") else "here"
        with Path(spec.options["noted_in"]).open("a") as file:
            file.write(f"{here}\n")
        return make_torch_engine(spec, tokenizer, device, barrier=barrier, share_with=share_with)
