"""The command `trireme convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint_dir: Annotated[
        list[Path],
        typer.Option(
            "--checkpoint-dir", "-c", help="A run's folder, or a checkpoint in it; may be repeated."
        ),
    ],
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
            "bfloat16, and a model.safetensors keeps its type."
        ),
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="The largest size of a file, in 10^9 bytes.")
    ] = 5.0,
) -> None:
    """Export checkpoints for transformers.

    It reads this trainer's checkpoints, FSDP shards, and Megatron's.
    """
    from trireme.ext.converters.report import convert as command

    raise typer.Exit(command(checkpoint_dir, base_model_dir, dtype, max_shard_gb))
