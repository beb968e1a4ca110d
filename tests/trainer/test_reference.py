"""A reference that follows the policy: what it becomes, when, and that a resume has it too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.ranks import run
from tests.trainer.samples import apart, backend_of, experiences
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.batch import flatten
from trireme.checkpoint.layout import REFERENCE, JobFolder
from trireme.checkpoint.save import write_weights
from trireme.engines.torch.shell import load_shell, load_weights
from trireme.experience import EID, Experience
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState
from trireme.trainer.ranks import Ranks, RankSpec, whole
from trireme.trainer.step import train_step


def _recipe(**given: Any) -> Recipe:
    options = {
        "algorithm_type": "grpo",
        "kl_loss_fn": "k3",
        "kl_loss_fn_args": {"kl_coef": 0.3},
        "sync_ref_model": True,
        "ref_model_mixup_alpha": 0.25,
        "ref_model_sync_steps": 2,
    }
    return get_recipe(SimpleNamespace(**options | given))


def _of_reference(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend._reference_shards().items()}


def test_it_is_the_mean_of_both_in_weights_every_so_many_optimizer_steps(tiny_dir: Path) -> None:
    backend, recipe = backend_of(tiny_dir, reference=True), _recipe()
    expected = {name: tensor.double() for name, tensor in _of_reference(backend).items()}
    for step in range(1, 5):
        train_step(backend, recipe, experiences(step), version=0)
        if step in (2, 4):
            now = backend.weights()
            expected = {n: 0.25 * now[n].double() + 0.75 * t for n, t in expected.items()}
        for name, tensor in _of_reference(backend).items():
            assert torch.allclose(tensor.double(), expected[name], atol=5e-7, rtol=0), (step, name)
    # and its scores are those of such a model
    batch = flatten(experiences())
    plain = backend_of(tiny_dir)
    plain.module.load_state_dict(expected, strict=False)
    scores = backend.logprobs(batch, reference=True)
    assert torch.allclose(scores, plain.logprobs(batch), atol=1e-5)
    assert not torch.allclose(scores, backend_of(tiny_dir).logprobs(batch), atol=1e-5)


def test_steps_on_one_batch_count(tiny_dir: Path) -> None:
    backend = backend_of(tiny_dir, reference=True)
    begun = _of_reference(backend)
    recipe = _recipe(num_iterations=2, ref_model_mixup_alpha=1.0)
    train_step(backend, recipe, experiences(), version=0)
    weights = backend.weights()
    for name, tensor in _of_reference(backend).items():
        assert torch.equal(tensor, weights[name])
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in begun.items())


def test_a_data_sets_scores_are_computed_anew(tiny_dir: Path) -> None:
    """Pairs come again epoch after epoch; what the old reference said of them is forgotten."""
    recipe = get_recipe(
        SimpleNamespace(
            algorithm_type="dpo",
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=1.0,
        )
    )
    pair = Experience(
        [5, 6, 7], prompt_length=3, chosen=[8, 9], rejected=[10, 11], eid=EID(1, 0, 0)
    )
    backend, state = backend_of(tiny_dir, reference=True), TrainState(recipe)
    margins = [
        train_step(backend, recipe, [pair], version=0, train_state=state)["actor/dpo_margin"]
        for _ in range(3)
    ]
    # the policy is its own reference at the start of every step
    assert margins == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)


def _trained(backend: Backend, steps: range) -> dict[str, Tensor]:
    for step in steps:
        train_step(backend, _recipe(), experiences(step), version=0)
    return {name: tensor.clone() for name, tensor in backend.each_weight()} | {
        "reference": backend.logprobs(flatten(experiences()), reference=True)
    }


def test_a_resumed_run_has_the_reference_that_it_left(tiny_dir: Path, tmp_path: Path) -> None:
    backend = backend_of(tiny_dir, reference=True)
    _trained(backend, range(1))
    (tmp_path / "early").mkdir()
    (tmp_path / "actor").mkdir()
    backend.save(tmp_path / "early", hf=False)
    assert not (tmp_path / "early" / REFERENCE).exists()  # it is the model that the run began with
    _trained(backend, range(1, 3))
    backend.save(tmp_path / "actor", hf=False)
    whole = _trained(backend, range(3, 5))
    resumed = backend_of(tiny_dir, reference=True)
    resumed.load(tmp_path / "actor")
    again = _trained(resumed, range(3, 5))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_an_engine_reads_the_policy_of_such_a_checkpoint(tiny_dir: Path, tmp_path: Path) -> None:
    """One without an export, as all but the last are."""
    backend, job = backend_of(tiny_dir, reference=True), JobFolder(tmp_path)
    _trained(backend, range(3))
    job.hf_dir(3).mkdir(parents=True)
    backend.save(job.actor_dir(3), hf=False)
    assert (job.actor_dir(3) / REFERENCE).exists()
    shell = load_shell(tiny_dir, device="cpu", dtype="float32")
    load_weights(shell, job.weights_dir(3))
    served = shell.state_dict()
    for name, tensor in backend.weights().items():
        assert torch.equal(served[name], tensor), name


def test_a_run_that_has_no_use_for_it_any_more_leaves_it(tiny_dir: Path, tmp_path: Path) -> None:
    backend = backend_of(tiny_dir, reference=True)
    _trained(backend, range(3))
    backend.save(tmp_path, hf=False)
    without = backend_of(tiny_dir)
    without.load(tmp_path)
    for name, tensor in backend.weights().items():
        assert torch.equal(without.weights()[name], tensor), name


def _on_ranks(place: RankSpec, path: Path, actor: Path) -> list[dict[str, Tensor]]:
    ranks = Ranks(place)
    backend = backend_of(path, ranks, reference=True)
    out = [_trained(backend, range(3))]
    backend.save(actor, hf=False)
    out.append(_trained(backend, range(3, 5)))
    resumed = backend_of(path, ranks, reference=True)
    resumed.load(actor)
    out.append(_trained(resumed, range(3, 5)))
    ranks.close()
    return out


def test_two_ranks_do_what_one_process_does(tiny_dir: Path, tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    actor.mkdir()
    first, whole, resumed = run(_on_ranks, tmp_path / "two", tiny_dir, actor)[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    written = actor / REFERENCE  # the rows of both ranks are the file that one process writes
    write_weights(tmp_path / written.name, load_file(written))
    assert written.read_bytes() == (tmp_path / written.name).read_bytes()
    alone = backend_of(tiny_dir, reference=True)
    other = backend_of(tiny_dir, reference=True)
    other.load(actor)  # what two ranks wrote
    for got, expected in (
        (first, _trained(alone, range(3))),
        (whole, _trained(alone, range(3, 5))),
        (whole, _trained(other, range(3, 5))),
    ):
        assert apart(got, expected, 2e-5) < 1e-3


def _moved_little_by_little(place: RankSpec, path: Path) -> list[float]:
    ranks = Ranks(place)
    options = {"dtype": "bfloat16", "moves_reference": True}
    backend = backend_of(path, ranks, reference=True, **options)
    begun = {name: whole(t).clone() for name, t in _of_reference(backend).items()}
    for parameter in backend.module.parameters():
        parameter.data.mul_(1.001)  # less than bfloat16 distinguishes
    for _ in range(20):
        backend.move_reference(0.1)
    now = _of_reference(backend).items()
    shares = [float((whole(t) - begun[n]).norm() / (0.001 * begun[n]).norm()) for n, t in now]
    ranks.close()
    return shares


def test_moves_add_up_where_ranks_compute_in_bfloat16(tiny_dir: Path, tmp_path: Path) -> None:
    for shares in run(_moved_little_by_little, tmp_path / "two", tiny_dir):
        assert shares == pytest.approx([1 - 0.9**20] * len(shares), rel=1e-2)


def test_what_has_no_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync_ref_model is true, and 'grpo' has no reference"):
        _recipe(kl_loss_fn="none")
