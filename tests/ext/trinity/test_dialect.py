"""Options of Trinity-RFT's losses that say how a batch is cut are noted, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.config.test_trinity_corpus import base, documents, loaded
from trireme.launch.check import examine

__all__ = ["base"]  # a fixture

DOCUMENTS = documents(Path(__file__).with_name("corpus.yaml"))


def test_how_a_mixed_batch_is_cut_is_noted(base: dict[str, Any], tmp_path: Path) -> None:
    loaded(base, tmp_path / "run.yaml", DOCUMENTS["mix_with_the_layout_of_its_batches"])
    report = examine(tmp_path / "run.yaml")
    assert [str(problem) for problem in report.problems] == []
    [plan] = report.plans
    [note] = [note for note in plan.notes if note.startswith("without effect here: ")]
    args = "algorithm.policy_loss_fn_args"
    assert f"{args}.train_batch_size_expert=16" in note and f"{args}.use_dynamic_bsz=True" in note
    assert f"{args}.mu" not in note
