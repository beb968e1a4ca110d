"""The command `trireme convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder, or a checkpoint in it; with --gguf the model's folder to write."
        ),
    ] = None,
    checkpoint_dir: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint-dir", "-c", help="The same as FOLDER; may be repeated."),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="A llama.cpp file (GGUF), which becomes a folder for transformers."),
    ] = None,
    base_model_dir: Annotated[
        Path | None,
        typer.Option(
            "--base-model-dir", "-b", help="The folder of config.json, if the checkpoint has none."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16, float32, or auto (as stored). By default shards become "
            "bfloat16, and a model.safetensors keeps its dtype."
        ),
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="The maximum size of a file, in 10^9 bytes.")
    ] = 5.0,
) -> None:
    """Export checkpoints for transformers.

    It reads this trainer's checkpoints, FSDP shards, Megatron's, and files of llama.cpp.
    """
    from trireme.ext.converters.report import convert as command
    from trireme.ext.converters.report import convert_file

    if gguf is not None:
        if folder is None:
            raise typer.BadParameter("expected both: --gguf FILE FOLDER")
        if checkpoint_dir or base_model_dir:
            raise typer.BadParameter("--gguf FILE FOLDER cannot be combined with a checkpoint")
        raise typer.Exit(convert_file(gguf, folder, dtype))
    folders = [*([] if folder is None else [folder]), *(checkpoint_dir or [])]
    if not folders:
        raise typer.BadParameter("expected a run's folder or a checkpoint, or --gguf FILE FOLDER")
    raise typer.Exit(command(folders, base_model_dir, dtype, max_shard_gb))
