"""Engine flags: reads vLLM's options as ms-swift's rollout server spells them."""

from __future__ import annotations

from typing import Any

import typer
import yaml
from typer.core import TyperCommand

from trireme.cli.flag_names import IDLE

_VLLM = ("pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager")
_VLLM += ("enable_prefix_caching", "enable_expert_parallel", "max_num_seqs")
"""Options of vLLM's engine that `trireme rollout` passes on."""


class WithEngineFlags(TyperCommand):
    """A command that also takes vLLM's options as ms-swift spells them; they are in its context's
    `obj`, by their keys in `explorer.rollout_model`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out; what has no effect is said."""
        own = {name.lstrip("-") for p in self.params for name in p.opts}
        ctx.obj = {}
        rest: list[str] = []
        words = list(args)
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            key = name.removeprefix("vllm_")
            if not word.startswith("--") or name in own or (key not in _VLLM and name not in IDLE):
                rest.append(word)
                continue
            if not equals and not words:
                raise typer.BadParameter(f"--{name} needs a value")
            value = value if equals else words.pop(0)
            if key in _VLLM:
                ctx.obj[key] = yaml.safe_load(value)
            else:
                typer.echo(f"note: --{name} is without effect here: {IDLE[name]}", err=True)
        return super().parse_args(ctx, rest)
