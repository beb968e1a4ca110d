"""Exports of checkpoints whose weights explorers have read already."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.test_write import published_and_saved
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import load_checkpoint
from trireme.ext.converters.convert import Checkpoint, convert_checkpoint


def test_steps_with_and_without_a_copy_for_explorers_are_exported_in_the_dtype_of_exports(
    tmp_path: Path,
) -> None:
    path = make_model(tmp_path / "model")
    run(published_and_saved, tmp_path / "ranks", path, tmp_path / "job")
    job = JobFolder(tmp_path / "job")
    for step in (2, 4):  # one without that copy, one with it
        convert_checkpoint(Checkpoint(job.step_dir(step), job.actor_dir(step)))
        exported = load_file(job.hf_dir(step) / "model.safetensors")
        assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert load_checkpoint(job) is not None
