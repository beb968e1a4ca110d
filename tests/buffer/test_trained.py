"""What train steps made of their tokens is kept, within bounds, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.buffer.made import experience
from trireme.batch import flatten
from trireme.buffer import trained
from trireme.buffer.trained import TrainedTokens, eids_of, files, read_trained


def step(kept: TrainedTokens, number: int, count: int = 3) -> None:
    made = [experience(number, 0, run, 1.0) for run in range(count)]
    for e in made:
        e.advantages = e.mask.float()
    batch = flatten(made)
    kept.begin(batch)
    kept.add(batch.select([0, 2]), torch.arange(8.0))  # sample 1 was left out of the loss
    kept.end(number)


def test_each_token_comes_back_with_its_numbers(tmp_path: Path) -> None:
    kept = TrainedTokens(tmp_path)
    step(kept, 1)
    kept.close()
    ((number, path),) = files(tmp_path / "trained")
    assert number == 1 and eids_of(path) == ["1/0/0/0", "1/0/1/0", "1/0/2/0"]
    found = read_trained(path, "1/0/2/0")
    assert found is not None
    assert found["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
    assert found["positions"].tolist() == [2, 3, 4, 5]
    assert found["trained_logprobs"].tolist() == [4, 5, 6, 7]
    assert found["old_logprobs"].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert found["advantages"].tolist() == [1, 1, 1, 1]
    idle = read_trained(path, "1/0/1/0")
    assert idle is not None and np.isnan(idle["trained_logprobs"]).all()
    assert read_trained(path, "1/0/9/0") is None


def test_rollouts_without_a_trained_token_have_empty_rows_wherever_they_stand(
    tmp_path: Path,
) -> None:
    made = [experience(1, 0, run, 1.0) for run in range(3)]
    for idle in (made[0], made[2]):  # as where the prompt fills the model's length
        idle.mask = torch.zeros_like(idle.mask)
    batch = flatten(made)
    kept = TrainedTokens(tmp_path)
    kept.begin(batch)
    kept.add(batch, torch.arange(4.0))
    kept.end(1)
    kept.close()
    ((_, path),) = files(tmp_path / "trained")
    for run, count in enumerate((0, 4, 0)):
        found = read_trained(path, f"1/0/{run}/0")
        assert found is not None
        assert found["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
        assert {len(row) for name, row in found.items() if name != "tokens"} == {count}


def test_a_step_keeps_whole_groups_until_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "MOST_TOKENS", 12)  # three rollouts of four trained tokens
    kept = TrainedTokens(tmp_path)
    batch = flatten([experience(1, task, run, 1.0) for task in (0, 1) for run in (0, 1)])
    kept.begin(batch)
    kept.add(batch, torch.zeros(16))
    kept.end(1)
    kept.close()
    ((_, path),) = files(tmp_path / "trained")
    assert eids_of(path) == ["1/0/0/0", "1/0/1/0"]


def test_past_its_limit_the_older_steps_are_thinned(tmp_path: Path) -> None:
    kept = TrainedTokens(tmp_path)
    step(kept, 1)
    kept.close()
    size = files(tmp_path / "trained")[0][1].stat().st_size
    kept = TrainedTokens(tmp_path, limit=10.5 * size)
    for number in range(1, 41):
        step(kept, number)
    kept.close()
    left = files(tmp_path / "trained")
    assert 5 <= len(left) <= 10 and left[-1][0] == 40
    assert left[0][0] == 1  # the beginning of a run is seen beside its end
    assert sum(path.stat().st_size for _, path in left) <= 10.5 * size


def test_a_step_does_not_look_at_the_files_of_all_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(trained, "files", lambda folder: looks.append(folder) or files(folder))
    kept = TrainedTokens(tmp_path, limit=1e9)
    for number in range(1, 11):
        step(kept, number)
    kept.close()
    assert len(looks) == 1 and len(files(tmp_path / "trained")) == 10


def test_a_resume_removes_what_it_does_again(tmp_path: Path) -> None:
    kept = TrainedTokens(tmp_path)
    for number in (1, 2, 3):
        step(kept, number)
    kept.rewind(2)
    kept.close()
    assert [number for number, _ in files(tmp_path / "trained")] == [1, 2]
