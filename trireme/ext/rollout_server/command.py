"""The command `trireme rollout`, with vLLM's flags as ms-swift spells them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer
from typer.core import TyperCommand

from trireme.cli.arguments import flag_dialects, is_alone, with_options
from trireme.ext.rollout_server.options import RolloutOptions

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_VLLM = ("pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager")
_VLLM += ("enable_prefix_caching", "enable_expert_parallel", "max_num_seqs")
"""Options of vLLM's engine that `trireme rollout` passes on."""
_SWITCHES = ("enforce_eager", "enable_prefix_caching", "enable_expert_parallel")
"""Those that are true or false, and need no value."""
_IDLE = {"max_length": "each request sets how much it may sample; --vllm_max_model_len limits both"}
"""Further flags without effect on it."""


class WithEngineFlags(TyperCommand):
    """A command that also takes vLLM's options as ms-swift spells them; they are in its context's
    `obj`, by their keys in `explorer.rollout_model`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out; what has no effect is said."""
        import yaml

        own = {name.lstrip("-") for p in self.params for name in p.opts}
        idle = {flag: why for one in flag_dialects() for flag, why in one.idle.items()} | _IDLE
        ctx.obj = {}
        rest: list[str] = []
        words = list(args)
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            key = name.removeprefix("vllm_")
            if not word.startswith("--") or name in own or (key not in _VLLM and name not in idle):
                rest.append(word)
                continue
            if not equals and is_alone(words):
                if key not in _SWITCHES and name not in idle:
                    raise typer.BadParameter(f"--{name} needs a value")
                value = "true"
            elif not equals:
                value = words.pop(0)
            if key in _VLLM:
                ctx.obj[key] = yaml.safe_load(value)
            else:
                typer.echo(f"note: --{name} has no effect here: {idle[name]}", err=True)
        return super().parse_args(ctx, rest)


@app.command(cls=WithEngineFlags)
@with_options(RolloutOptions)
def rollout(ctx: typer.Context, options: RolloutOptions) -> None:
    """Serve a model to trainers and agents, and as an OpenAI API."""
    from trireme.ext.rollout_server.rollout import rollout as command

    raise typer.Exit(command(replace(options, engine_options=ctx.obj)))
