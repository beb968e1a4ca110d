"""Critic on several ranks: values, metrics, weights and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import apart, critic_of, experiences
from trireme.batch import Batch, flatten
from trireme.trainer.critic import Critic
from trireme.trainer.ranks import Ranks, RankSpec, whole

# By name: what the critic is given.
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many_micro_batches": {"max_token_len": 30},
    "unshared_checkpointed_offloaded": {
        "share_prefix": False,
        "gradient_checkpointing": True,
        "offload": True,
    },
}


def _make(path: Path, name: str = "plain", ranks: Ranks | None = None) -> Critic:
    return critic_of(path, ranks, **LAYOUTS[name])


def _batches() -> list[Batch]:
    """Four, the last of which leaves all ranks but one without work."""
    samples = [*(experiences(n) for n in range(3)), experiences(3)[:1]]
    return [flatten(each) for each in samples]


def _learn(critic: Critic, batches: list[Batch]) -> list[dict[str, float]]:
    """The metrics of an update from each."""
    return [
        critic.update(
            batch.with_fields(values=critic.values(batch), returns=(batch.targets % 7).float())
        )
        for batch in batches
    ]


def _weights(critic: Critic) -> dict[str, Tensor]:
    return {name: whole(tensor).clone() for name, tensor in critic.weights().items()}


def _learned(critic: Critic) -> dict[str, Any]:
    metrics = _learn(critic, _batches())
    values = critic.values(flatten(experiences(7)))
    return {"metrics": metrics, "values": values, "weights": _weights(critic)}


def _learns(place: RankSpec, path: Path, names: list[str]) -> dict[str, Any]:
    ranks = Ranks(place)
    out = {name: _learned(_make(path, name, ranks)) for name in names}
    ranks.close()
    return out


def _same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected["values"].abs().min() > 0
    assert torch.allclose(got["values"], expected["values"], atol=1e-5)
    assert apart(got["weights"], expected["weights"]) < 1e-3
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    ("world", "sequence", "names"),
    [(2, 1, list(LAYOUTS)), (2, 2, ["plain"]), (4, 2, ["many_micro_batches"])],
)
def test_ranks_value_and_learn_what_one_process_does(world, sequence, names, tmp_path):
    path = make_model(tmp_path / "model", tie=sequence > 1)
    ranks = run(_learns, tmp_path / "ranks", path, names, world=world, sequence=sequence)
    for name in names:
        expected = _learned(_make(path, name))
        for got in ranks:
            _same(got[name], expected)
        assert all(torch.equal(got[name]["values"], ranks[0][name]["values"]) for got in ranks)


def _goes_on(place: RankSpec, path: Path, job: Path, alone: Path) -> list[dict[str, Tensor]]:
    """After four updates: in one go, saved and loaded after two, and from what one process saved
    after two.
    """
    ranks = Ranks(place)
    first, second = _batches()[:2], _batches()[2:]
    critic = _make(path, ranks=ranks)
    _learn(critic, first)
    critic.save(job)
    _learn(critic, second)
    out = [_weights(critic)]
    for folder in (job, alone):
        resumed = _make(path, ranks=ranks)
        resumed.load(folder)
        _learn(resumed, second)
        out.append(_weights(resumed))
    ranks.close()
    return out


def test_what_two_ranks_or_one_process_save_any_number_goes_on_with(tiny_dir, tmp_path):
    job, alone, other = tmp_path / "job", tmp_path / "alone", tmp_path / "other"
    for folder in (job, alone, other):
        folder.mkdir()
    critic = _make(tiny_dir)
    _learn(critic, _batches()[:2])
    critic.save(alone)
    whole_run, resumed, from_one = run(_goes_on, tmp_path / "two", tiny_dir, job, alone)[0]
    _learn(critic, _batches()[2:])
    assert sorted(path.name for path in job.iterdir()) == [
        *(f"extra_state_world_size_2_rank_{rank}.pt" for rank in (0, 1)),
        "model.safetensors",
        *(f"optim_world_size_2_rank_{rank}.pt" for rank in (0, 1)),
    ]
    back = _make(tiny_dir)
    back.load(job)
    _learn(back, _batches()[2:])
    three = run(_goes_on, tmp_path / "three", tiny_dir, other, job, world=3)[0][2]
    expected = critic.weights()
    assert all(torch.equal(resumed[name], whole_run[name]) for name in expected)
    for got in (whole_run, from_one, back.weights(), three):
        assert apart(got, expected) < 1e-3


def _breaks(place: RankSpec, path: Path, folder: Path) -> list[str]:
    """What a rank raises for a return that is infinite, and for a folder that is none."""
    ranks = Ranks(place)
    critic = _make(path, "many_micro_batches", ranks)
    _learn(critic, _batches()[:1])
    before, batch, said = _weights(critic), _batches()[1], []
    returns = torch.ones(batch.num_tokens)
    returns[-1] = torch.inf  # of one sample, on one of the ranks
    with pytest.raises(FloatingPointError) as caught:
        critic.update(batch.with_fields(values=critic.values(batch), returns=returns))
    said.append(str(caught.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in _weights(critic).items())
    own = folder / "job"  # rank 1 alone does not see it
    with pytest.raises((OSError, ValueError)) as caught:
        critic.save(own if place.rank == 0 else folder / "other")
    said.append(type(caught.value).__name__)
    ranks.close()
    return said


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_moves_nothing(tiny_dir, tmp_path):
    (tmp_path / "job").mkdir()
    first, second = run(_breaks, tmp_path / "ranks", tiny_dir, tmp_path)
    assert first == second == ["critic step 2: the gradient norm is nan", "CannotWrite"]
