"""The door `[reader]`: a package of others brings a reader of checkpoints, as ours enter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.packages import install, manifests_read_anew
from tests.test_documents import blocks_of
from trireme.ext.converters.convert import Checkpoint, Options, convert_checkpoint

MANIFEST = """
about = "What a made-up package brings."
[reader]
plain = "things:Plain"
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A package that brings what MANIFEST names."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    with manifests_read_anew():
        code = blocks_of("checkpoints.md")
        install(tmp_path / "site", "made_up", MANIFEST, code, package="made_up", first_line="")
        yield
    for module in ("made_up", "made_up.things"):
        sys.modules.pop(module, None)


def test_a_reader_gives_the_weights_of_the_folders_that_have_its_files(
    package: None, tmp_path: Path, tiny_dir: Path
) -> None:
    step = tmp_path / "global_step_3"
    actor = step / "actor"
    actor.mkdir(parents=True)
    before = convert_checkpoint(Checkpoint(step, actor))
    assert before.status == "failed" and before.text.startswith("there is no model.safetensors")
    assert before.text.endswith(f" and no weights.plain in {actor}")
    tensors = load_file(tiny_dir / "model.safetensors")
    torch.save(tensors, actor / "weights.plain")
    done = convert_checkpoint(Checkpoint(step, actor), Options(tiny_dir, dtype="float32"))
    assert done.status == "exported", done.text
    exported = load_file(actor / "huggingface" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in tensors.items())
