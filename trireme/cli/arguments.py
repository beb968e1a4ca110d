"""Arguments: the options of commands: shared ones, those with much to say, and vLLM's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperCommand

from trireme.cli.flag_names import IDLE

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[YAML] [KEY=VALUE]...",
        help="The run's YAML, and keys to override, such as trainer.grad_clip=0.5.",
    ),
]
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the YAML to override.")
]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="A folder of *.py files to load first; may be repeated."),
]
OptionalConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The YAML of the run; without it, the built-in demo."),
]
EvalConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="A YAML with eval_tasksets, in place of --tasks."),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        "--api_key",
        help="The key of clients, visible in the process list; or set TRIREME_API_KEY.",
    ),
]
ServerKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", "--api_key_file", help="A file that holds the key.")
]
EngineType = Annotated[
    str, typer.Option("--dtype", "--torch_dtype", help="auto, float32, bfloat16 or float16.")
]
ModelLength = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        "--max_model_len",
        "--vllm_max_model_len",
        min=2,
        help="Tokens with the prompt.",
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(
        "--tool-call-parser",
        "--tool_call_parser",
        help="The format of tool calls, or a function's path; by default the template's.",
    ),
]
AsyncEngine = Annotated[
    str,
    typer.Option(
        "--use_async_engine",
        "--vllm_use_async_engine",
        help="true: no request waits for the slowest one of its batch.",
    ),
]
PageFile = Annotated[
    Path | None, typer.Option("--html", help="Write the page and its data to one file, and exit.")
]
PageHost = Annotated[
    str, typer.Option("--host", help="The address to bind to; beyond loopback a key is required.")
]
PagePort = Annotated[
    int | None, typer.Option("--port", min=1, max=65535, help="By default 6600, or a free one.")
]
PageKey = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file with the page's key, instead of TRIREME_API_KEY."),
]
OpenBrowser = Annotated[
    bool, typer.Option("--open/--no-open", help="Open the browser, on a machine with a desktop.")
]
TaskFiles = Annotated[
    list[str] | None,
    typer.Option("--tasks", help="A data set to try, PATH or NAME=PATH; instead of a YAML."),
]
Ks = Annotated[
    list[int] | None,
    typer.Option("--k", "-k", min=1, help="The k of pass@k; by default 1 and the rollouts."),
]

GymEnv = Annotated[
    str | None, typer.Option("--gym_env", help="What gym_scheduler plays, where no row says.")
]
Thinking = Annotated[
    str | None,
    typer.Option("--enable_thinking", metavar="true|false", help="Passed to the chat template."),
]


def switch(name: str, text: str | None) -> bool | None:
    """What a flag `true` or `false` says; None where it is not given. BadParameter else."""
    if text is not None and text.lower() not in ("true", "false"):
        raise typer.BadParameter(f"--{name} {text}: expected true or false")
    return None if text is None else text.lower() == "true"


_VLLM = ("pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager")
_VLLM += ("enable_prefix_caching", "enable_expert_parallel", "max_num_seqs")
"""Options of vLLM's engine that `trireme rollout` passes on."""
_IDLE = {"max_length": "each request says how much it may sample; --vllm_max_model_len limits both"}
"""Further flags without effect on it."""


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
            idle = {**IDLE, **_IDLE}
            if not word.startswith("--") or name in own or (key not in _VLLM and name not in idle):
                rest.append(word)
                continue
            if not equals and not words:
                raise typer.BadParameter(f"--{name} needs a value")
            value = value if equals else words.pop(0)
            if key in _VLLM:
                ctx.obj[key] = yaml.safe_load(value)
            else:
                typer.echo(f"note: --{name} is without effect here: {idle[name]}", err=True)
        return super().parse_args(ctx, rest)
