"""The command `trireme rollout`, with vLLM's flags as ms-swift spells them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trireme.cli.arguments import flag_dialects

app = typer.Typer(add_completion=False, rich_markup_mode=None)

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
GymEnv = Annotated[
    str | None, typer.Option("--gym_env", help="What gym_scheduler plays, where no row says.")
]
Thinking = Annotated[
    str | None,
    typer.Option("--enable_thinking", metavar="true|false", help="Passed to the chat template."),
]


def switch(name: str, text: str | None) -> bool | None:
    """Convert a flag's `true` or `false`; None if it is not given. Raises BadParameter for other
    texts.
    """
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
            if not equals and not words:
                raise typer.BadParameter(f"--{name} needs a value")
            value = value if equals else words.pop(0)
            if key in _VLLM:
                ctx.obj[key] = yaml.safe_load(value)
            else:
                typer.echo(f"note: --{name} is without effect here: {idle[name]}", err=True)
        return super().parse_args(ctx, rest)


@app.command(cls=WithEngineFlags)
def rollout(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", help="A model's folder, or its id.")],
    host: Annotated[str, typer.Option(help="Beyond loopback a key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: ServerKey = None,
    api_key_file: ServerKeyFile = None,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch",
    engine_python: Annotated[
        str | None,
        typer.Option("--engine-python", help="The Python interpreter of an environment with vLLM."),
    ] = None,
    dtype: EngineType = "auto",
    max_model_len: ModelLength = None,
    tool_call_parser: ToolCallParser = None,
    use_async_engine: AsyncEngine = "true",
    enable_thinking: Thinking = None,
    multi_turn_scheduler: Annotated[
        str | None, typer.Option("--multi_turn_scheduler", help="A registered name, or a path.")
    ] = None,
    gym_env: GymEnv = None,
    max_turns: Annotated[
        int | None,
        typer.Option("--max_turns", "--multi_turns", min=0, help="The most turns; 0: no limit."),
    ] = None,
    external_plugins: Annotated[
        list[Path] | None, typer.Option("--external_plugins", help="Python files to load first.")
    ] = None,
    plugins: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Further files of --external_plugins."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of sampling.")] = 42,
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="At once.")] = 4096,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor_parallel_size", "--vllm_tensor_parallel_size", min=1)
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option("--data_parallel_size", "--vllm_data_parallel_size", min=1)
    ] = 1,
) -> None:
    """Serve a model to trainers and agents, and as an OpenAI API."""
    from trireme.ext.rollout_server.rollout import RolloutOptions
    from trireme.ext.rollout_server.rollout import rollout as command

    options = RolloutOptions(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        api_key_file=api_key_file,
        engine=engine,
        engine_python=engine_python,
        dtype=dtype,
        max_model_len=max_model_len,
        tool_call_parser=tool_call_parser,
        use_async_engine=switch("use_async_engine", use_async_engine) is True,
        enable_thinking=switch("enable_thinking", enable_thinking),
        gym_env=gym_env,
        engine_options=ctx.obj,
        multi_turn_scheduler=multi_turn_scheduler,
        max_turns=max_turns,
        external_plugins=[*(external_plugins or []), *(plugins or [])],
        seed=seed,
        max_requests=max_requests,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
    )
    raise typer.Exit(command(options))
