"""Write: checkpoints behind the training are those of their step, whole or not there."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.limits import HANG_S
from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, experiences
from trireme.algorithms.recipes import get_recipe
from trireme.checkpoint import export
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import load_checkpoint
from trireme.checkpoint.save import Saving, save_weights
from trireme.files import CannotWrite
from trireme.trainer import lora as lora_module
from trireme.trainer import write
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo", kl_loss_fn="none"))
STATE: dict[str, Any] = {"version": 0, "buffer": {}}


def _train(backend: Backend, seed: int) -> None:
    train_step(backend, RECIPE, experiences(seed), version=0)


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_what_is_trained_meanwhile_is_not_in_the_files(lora, tiny_dir, tmp_path, monkeypatch):
    backend = backend_of(tiny_dir, lora=lora)
    _train(backend, 0)
    for name in ("now", "behind"):
        (tmp_path / name / "huggingface").mkdir(parents=True)
    backend.save(tmp_path / "now", hf=True)
    go, real = threading.Event(), export.SharedFiles.write

    def slow(self: Any, parts: Any) -> None:  # a disk that takes nothing until it is told to
        assert go.wait(HANG_S)
        real(self, parts)

    monkeypatch.setattr(export.SharedFiles, "write", slow)
    backend.begin_save(tmp_path / "behind", hf=True, behind=True)
    _train(backend, 1)  # nothing waits for the disk
    go.set()
    backend.end_save()
    assert _files(tmp_path / "behind") == _files(tmp_path / "now")
    resumed = backend_of(tiny_dir, lora=lora)
    resumed.load(tmp_path / "behind")
    _train(resumed, 1)
    for name, tensor in backend.weights().items():
        assert torch.equal(resumed.weights()[name], tensor), name


def test_a_failed_write_is_raised_when_the_save_ends(tiny_dir, tmp_path):
    backend = backend_of(tiny_dir)
    (tmp_path / "actor").mkdir()
    backend.begin_save(tmp_path / "actor", hf=False, behind=True)
    backend.end_save()
    (tmp_path / "actor" / "model.safetensors").unlink()
    (tmp_path / "actor" / "optim_world_size_1_rank_0.pt").unlink()
    (tmp_path / "actor" / "optim_world_size_1_rank_0.pt").mkdir()
    backend.begin_save(tmp_path / "actor", hf=False, behind=True)
    with pytest.raises(CannotWrite, match=r"cannot write .*optim_world_size_1_rank_0.pt: Is a dir"):
        backend.end_save()


def test_the_export_is_in_the_models_dtype_in_shards_and_a_resume_is_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "DEFAULT_SHARD_BYTES", 8000)
    path = make_model(tmp_path / "model", tie=False)
    backend = backend_of(path, export_dtype=torch.bfloat16)
    _train(backend, 0)
    actor = tmp_path / "actor"
    hf = actor / "huggingface"
    hf.mkdir(parents=True)
    backend.save(actor, hf=True)
    for name in ("config.json", "tokenizer.json"):
        (hf / name).write_bytes((path / name).read_bytes())
    assert (hf / "model.safetensors.index.json").exists()
    assert len(list(hf.glob("model-*-of-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(hf, dtype="bfloat16").state_dict()
    for name, tensor in backend.weights().items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name
    resumed = backend_of(path)
    resumed.load(actor)
    for name, tensor in backend.weights().items():
        assert torch.equal(resumed.weights()[name], tensor), name


def test_integers_that_a_model_keeps_are_not_rounded(tiny_dir, tmp_path):
    backend = backend_of(tiny_dir, export_dtype=torch.bfloat16)
    counts = torch.tensor([3, 2**24 + 1])
    backend.module.register_buffer("counts", counts)
    (tmp_path / "huggingface").mkdir()
    backend.save(tmp_path, hf=True)
    for folder in (tmp_path, tmp_path / "huggingface"):
        assert torch.equal(load_file(folder / "model.safetensors")["counts"], counts)


def _saved(place: RankSpec, path: Path, folder: Path, lora: bool) -> dict[str, Any]:
    ranks = Ranks(place)
    adapter = Lora(rank=4) if lora else None
    backend = backend_of(path, ranks, lora=adapter, export_dtype=torch.bfloat16)
    _train(backend, 0)
    weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    backend.begin_save(folder, hf=True, behind=True)
    _train(backend, 1)
    backend.end_save()
    ranks.close()
    return weights


@pytest.mark.parametrize("lora", [False, True])
def test_ranks_write_their_own_rows_of_the_export(lora, tmp_path, monkeypatch):
    path = make_model(tmp_path / "model", hidden=40)
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    weights = run(_saved, tmp_path / "ranks", path, actor, lora, world=3)[
        0
    ]  # 3 splits nothing even
    written = load_file(actor / "huggingface" / "model.safetensors")
    assert set(written) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor.bfloat16()), name


KILLED = """
import sys, threading, time
from pathlib import Path
from tests.trainer import test_write as t
from trireme.checkpoint import export

job, model = map(Path, sys.argv[1:])
backend = t.backend_of(model)
saving = t.Saving(t.JobFolder(job), 1, run_state=t.STATE, model_dir=model)
backend.save(saving.actor, hf=True)
saving.finish()
real = export.SharedFiles.write

def throttled(self, parts):
    for number, part in enumerate(parts):
        real(self, [part])
        if number == 3:
            print("half", flush=True)
            time.sleep(600)

export.SharedFiles.write = throttled
t._train(backend, 0)
saving = t.Saving(t.JobFolder(job), 2, run_state=t.STATE, model_dir=model)
backend.begin_save(saving.actor, hf=True, behind=True)
t._train(backend, 1)
print("trained on", flush=True)
time.sleep(600)
"""


def test_a_process_killed_amid_a_write_leaves_the_checkpoint_before(tiny_dir, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(tiny_dir)]
    errors = tmp_path.with_suffix(".err")
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        assert process.stdout is not None
        said = {process.stdout.readline().decode().strip() for _ in range(2)}
        process.kill()
    assert said == {"half", "trained on"}, errors.read_text()
    assert list(tmp_path.glob(".tmp-global_step_2-*")), "it was being written"
    loaded = load_checkpoint(JobFolder(tmp_path))
    assert loaded is not None and loaded.step == 1
    assert not list(tmp_path.glob(".tmp-*"))
    backend_of(tiny_dir).load(loaded.actor)


def test_an_adapter_is_merged_one_layer_at_a_time(tiny_dir, tmp_path, monkeypatch):
    alive: list[weakref.ref[torch.Tensor]] = []
    most, real = 0, lora_module._merged

    def merged(layer: Any, base: torch.Tensor) -> torch.Tensor:
        nonlocal most
        made = real(layer, base)
        alive.append(weakref.ref(made))
        most = max(most, sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(lora_module, "_merged", merged)
    backend = backend_of(tiny_dir, lora=Lora(rank=4))
    (tmp_path / "huggingface").mkdir()
    backend.save(tmp_path, hf=True)
    assert len(alive) == 14 and most <= 2  # 7 layers in each of 2 blocks


def test_weights_that_are_published_meanwhile_stay_the_newest(tiny_dir, tmp_path):
    backend = backend_of(tiny_dir)
    job = JobFolder(tmp_path)
    saving = Saving(job, 1, run_state=STATE, model_dir=tiny_dir)
    backend.save(saving.actor, hf=False)
    save_weights(job, 2, weights=backend.weights())
    saving.finish()
    assert job.latest_weights_step() == 2
    assert job.latest_checkpoint.read_text() == "1"


def published_and_saved(place: RankSpec, path: Path, root: Path) -> None:
    """Both for a step, in either order, with an export in bfloat16 and without one."""
    ranks, job = Ranks(place), JobFolder(root)
    backend = backend_of(path, ranks, export_dtype=torch.bfloat16)

    def publish(step: int) -> None:
        weights = backend.weights()
        if place.rank == 0:
            save_weights(job, step, weights=weights, extra_files={"probe.json": b"{}"})

    def save(step: int, *, hf: bool) -> None:
        saving = Saving(job, step, run_state=STATE, model_dir=path) if place.rank == 0 else None
        actor = ranks.gather(saving and str(saving.actor))[0]
        backend.save(Path(actor), hf=hf)
        if saving:
            saving.finish()

    for step, hf in ((1, True), (2, False)):
        _train(backend, step)
        publish(step)
        save(step, hf=hf)
        _expect_exact(job, step, backend.weights())
    for step, hf in ((3, True), (4, False)):
        _train(backend, step)
        save(step, hf=hf)
        publish(step)
        _expect_exact(job, step, backend.weights())
    resumed = backend_of(path, ranks)
    resumed.load(job.actor_dir(4))
    for name, tensor in backend.weights().items():
        assert torch.equal(resumed.weights()[name], tensor), name
    ranks.close()


def _expect_exact(job: JobFolder, step: int, weights: dict[str, torch.Tensor]) -> None:
    """An explorer finds the step's weights as they are trained, and the probe of them."""
    assert job.latest_weights_step() == step
    assert (job.step_dir(step) / "probe.json").exists()
    files = sorted(job.weights_dir(step).glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), (step, name)


def test_explorers_find_exact_weights_where_ranks_save_what_was_published(tmp_path):
    path = make_model(tmp_path / "model")
    run(published_and_saved, tmp_path / "ranks", path, tmp_path / "job")
    job = JobFolder(tmp_path / "job")
    with_copy = [
        step for step in job.steps() if (job.actor_dir(step) / "model.safetensors").exists()
    ]
    assert with_copy == [3, 4], "older ones need no second copy"
    assert load_checkpoint(job) is not None
