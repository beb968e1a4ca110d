"""Arguments: the options of commands, those that several share and those with much to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
