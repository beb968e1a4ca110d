"""Options: the flags of `trireme rollout`, each with its default and its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer


def _switch(name: str, text: str | None) -> bool | None:
    """Convert a flag's `true` or `false`; None if it is not given. Raises BadParameter for other
    texts.
    """
    if text is not None and text.lower() not in ("true", "false"):
        raise typer.BadParameter(f"--{name} {text}: expected true or false")
    return None if text is None else text.lower() == "true"


@dataclass(frozen=True)
class RolloutOptions:
    """The command's options."""

    model: Annotated[str, typer.Option("--model", help="A model's folder, or its id.")]
    host: Annotated[
        str, typer.Option(help="The address to listen on; beyond loopback a key is required.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            "--api_key",
            help=(
                "The key that clients must send, visible in the process list; or set "
                "TRIREME_API_KEY."
            ),
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", "--api_key_file", help="A file with the key."),
    ] = None
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch"
    engine_python: Annotated[
        str | None,
        typer.Option("--engine-python", help="The Python interpreter of an environment with vLLM."),
    ] = None
    dtype: Annotated[
        str, typer.Option("--dtype", "--torch_dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            "--max_model_len",
            "--vllm_max_model_len",
            min=2,
            help="The maximum number of tokens of a prompt with its reply.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            "--tool-call-parser",
            "--tool_call_parser",
            help="The format of tool calls, or a function's path; by default the template's.",
        ),
    ] = None
    use_async_engine: Annotated[
        str,
        typer.Option(
            "--use_async_engine",
            "--vllm_use_async_engine",
            help="true: no request waits for the slowest one of its batch.",
        ),
    ] = "true"
    enable_thinking: Annotated[
        str | None,
        typer.Option(
            "--enable_thinking", metavar="true|false", help="Passed to the chat template."
        ),
    ] = None
    multi_turn_scheduler: Annotated[
        str | None,
        typer.Option("--multi_turn_scheduler", help="The scheduler: a registered name, or a path."),
    ] = None
    gym_env: Annotated[
        str | None,
        typer.Option("--gym_env", help="The environment of gym_scheduler, if the row names none."),
    ] = None
    max_turns: Annotated[
        int | None,
        typer.Option(
            "--max_turns", "--multi_turns", min=0, help="The maximum number of turns; 0: no limit."
        ),
    ] = None
    external_plugins: Annotated[
        list[Path] | None, typer.Option("--external_plugins", help="Python files to load first.")
    ] = None
    plugins: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Further files of --external_plugins."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="The seed of sampling.")] = 42
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="The maximum number of requests in flight.")
    ] = 4096
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor_parallel_size", "--vllm_tensor_parallel_size", min=1)
    ] = 1
    data_parallel_size: Annotated[
        int, typer.Option("--data_parallel_size", "--vllm_data_parallel_size", min=1)
    ] = 1
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's further options: no option of the command, but flags of `WithEngineFlags`."""

    def __post_init__(self) -> None:
        """Raise BadParameter for a switch that is neither true nor false."""
        _ = self.is_async, self.thinks

    @property
    def is_async(self) -> bool:
        """Return whether the engine is an asynchronous one."""
        return _switch("use_async_engine", self.use_async_engine) is True

    @property
    def thinks(self) -> bool | None:
        """Return what the chat template is given as `enable_thinking`."""
        return _switch("enable_thinking", self.enable_thinking)
