"""Fsdp2 checkpoints: the seed's files, exact resumes, and any number of ranks reads any other's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.models import save_checkpoint
from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import apart, backend_of, experiences
from trireme.algorithms.recipes import get_recipe
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import load_checkpoint
from trireme.registry import READERS
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo", kl_loss_fn="none"))


def _make(path: Path, lora: bool, ranks: Ranks | None = None) -> Backend:
    return backend_of(path, ranks, lora=Lora(rank=4) if lora else None)


def _train(backend: Any, steps: range) -> dict[str, Tensor]:
    """The weights after these steps."""
    for number in steps:
        train_step(backend, RECIPE, experiences(number), version=0)
    return {name: tensor.clone() for name, tensor in backend.each_weight()}


def _save(backend: Any, job: Path, path: Path) -> None:
    save_checkpoint(
        JobFolder(job),
        2,
        save=partial(backend.save, hf=True),
        run_state={"version": 0, "buffer": {}},
        model_dir=path,
    )


def _interrupted(place: RankSpec, path: Path, job: Path, lora: bool) -> list[dict[str, Tensor]]:
    """The weights after four steps: of one run, and of one that goes on after two."""
    ranks = Ranks(place)
    backend = _make(path, lora, ranks)
    _train(backend, range(2))
    if place.rank == 0:  # as under a leader: the others only write into the folder that it made
        _save(_Announced(backend), job, path)
    else:
        backend.save(Path(ranks.gather(None)[0]), hf=True)
    whole = _train(backend, range(2, 4))
    resumed = _make(path, lora, ranks)
    resumed.load(job / "global_step_2" / "actor")
    out = [whole, _train(resumed, range(2, 4))]
    ranks.close()
    return out


class _Announced:
    """Tells the other ranks where the temporary folder is, which orders do in a run."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def save(self, actor: Path, *, hf: bool) -> None:
        self._backend.gather(str(actor))
        self._backend.save(actor, hf=hf)


def _goes_on(place: RankSpec, path: Path, jobs: list[Path], lora: bool) -> list[dict[str, Tensor]]:
    """The weights after step 4 of each job, whoever wrote step 2."""
    ranks = Ranks(place)
    out = []
    for job in jobs:
        backend = _make(path, lora, ranks)
        backend.load(job / "global_step_2" / "actor")
        out.append(_train(backend, range(2, 4)))
    ranks.close()
    return out


def _close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert apart(got, expected) < 1e-3


@pytest.mark.parametrize("lora", [False, True])
def test_what_two_ranks_save_any_number_resumes(lora, tiny_dir, tmp_path):
    job, own = tmp_path / "job", tmp_path / "own"
    whole, resumed = run(_interrupted, tmp_path / "two", tiny_dir, job, lora)[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())

    actor = job / "global_step_2" / "actor"
    shards = {
        f"{kind}_world_size_2_rank_{r}.pt"
        for kind in ("model", "optim", "extra_state")
        for r in (0, 1)
    }
    files = {p.name for p in actor.iterdir()}
    assert files == shards | {"fsdp_config.json", "huggingface", *["lora_adapter"] * lora}
    assert json.loads((actor / "fsdp_config.json").read_text())["world_size"] == 2
    assert (actor / "huggingface" / "config.json").exists()
    manifest = json.loads((job / "global_step_2" / "manifest.json").read_text())
    assert {f"actor/{name}" for name in shards} < set(manifest["files"]) & set(manifest["xxh3_128"])
    loaded = load_checkpoint(JobFolder(job))
    assert loaded is not None and loaded.actor == actor

    alone = _make(tiny_dir, lora)
    alone.load(actor)
    _save(alone, own, tiny_dir)
    name = Path("global_step_2", "actor", "huggingface", "model.safetensors")
    if lora:  # merged by rows, or at once
        _close(load_file(job / name), load_file(own / name))
        adapter = Path("global_step_2", "actor", "lora_adapter")
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (job / adapter / file).read_bytes() == (own / adapter / file).read_bytes()
    else:
        assert (job / name).read_bytes() == (own / name).read_bytes()
    _close(_train(alone, range(2, 4)), whole)
    for got in run(_goes_on, tmp_path / "three", tiny_dir, [job, own], lora, world=3)[0]:
        _close(got, whole)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.large)])
def test_what_two_copies_of_two_shards_save_any_number_resumes(lora, tiny_dir, tmp_path):
    job = tmp_path / "job"
    found = run(_interrupted, tmp_path / "four", tiny_dir, job, lora, world=4, shards=2)
    for whole, resumed in found:
        assert all(torch.equal(resumed[name], tensor) for name, tensor in found[0][0].items())
        assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    alone = _make(tiny_dir, lora)
    alone.load(job / "global_step_2" / "actor")
    _close(_train(alone, range(2, 4)), found[0][0])
    for got in run(_goes_on, tmp_path / "two", tiny_dir, [job], lora)[0]:
        _close(got, found[0][0])
    if not lora and "fsdp" in READERS:  # as verl's hybrid shards
        actor = job / "global_step_2" / "actor"
        reader = READERS.get("fsdp")()
        for name, exported in load_file(actor / "huggingface" / "model.safetensors").items():
            joined = torch.empty_like(exported)
            reader.open(reader.find(actor), {}, None).fill(name, joined)
            assert torch.equal(joined, exported)


def test_the_files_of_another_model_are_refused(tiny_dir, tmp_path):
    other = make_model(tmp_path / "other", layers=1)
    backend = _make(other, False)
    _save(backend, tmp_path / "job", other)
    with pytest.raises(ValueError, match="belongs to another model: 11 tensors differ"):
        _make(tiny_dir, False).load(tmp_path / "job" / "global_step_2" / "actor")


def test_the_files_of_a_model_with_more_rows_are_refused(tiny_dir, tmp_path):
    backend = _make(tiny_dir, False)
    _save(backend, tmp_path / "job", tiny_dir)
    backend.module.resize_token_embeddings(92)
    backend.module.save_pretrained(tmp_path / "smaller")
    other = _make(tmp_path / "smaller", False)
    before = {name: tensor.clone() for name, tensor in other.weights().items()}
    why = r"another model: its model.embed_tokens.weight is \[100, 32\], and this one's \[92, 32\]"
    with pytest.raises(ValueError, match=why):
        other.load(tmp_path / "job" / "global_step_2" / "actor")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.weights().items())


def test_what_was_saved_without_lora_is_refused_with_it(tiny_dir: Path, tmp_path: Path) -> None:
    plain, adapted = (_make(tiny_dir, lora) for lora in (False, True))
    for name, backend in (("plain", plain), ("adapted", adapted)):
        (tmp_path / name).mkdir()
        backend.save(tmp_path / name, hf=False)
    with pytest.raises(ValueError, match=r"was saved without LoRA \(model\.lora_configs\), and"):
        adapted.load(tmp_path / "plain")
    with pytest.raises(ValueError, match="and this run trains without it: expected the same"):
        plain.load(tmp_path / "adapted")
