"""The summary is the same for programs and people."""

from __future__ import annotations

import json
from pathlib import Path

from trireme.monitor.console import summary_rows
from trireme.monitor.figures import Summary

WHOLE = Summary(
    accuracy_before=0.031,
    accuracy_sft=0.524,
    accuracy_rl=0.86,
    accuracy_more_sft=0.612,
    wall_s=221.3,
    phases={"sft": 38.0, "rl": 173.0},
    model_dir="/models/rl",
    next_command="trireme run --config mine.yaml",
)


def test_what_is_written_is_read_again_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = WHOLE.write(tmp_path / "job")
    assert Summary.read(tmp_path / "job") == WHOLE
    assert [f.name for f in (tmp_path / "job").iterdir()] == ["summary.json"]
    assert json.loads(path.read_text())["phases"] == {"sft": 38.0, "rl": 173.0}


def test_the_table_says_what_each_stage_gained() -> None:
    assert summary_rows(WHOLE) == [
        ("accuracy", "before        3.1%"),
        ("", "after SFT    52.4%   +49.3 points"),
        ("", "after RL     86.0%   +33.6 points"),
        ("", "more SFT     61.2%   in the same time instead of RL"),
        ("wall time", "3:41   (sft 0:38, rl 2:53)"),
        ("model", "/models/rl"),
        ("next", "trireme run --config mine.yaml"),
    ]


def test_what_was_not_measured_has_no_line() -> None:
    rows = summary_rows(Summary(accuracy_rl=0.5, wall_s=10))
    assert [label for label, _ in rows] == ["accuracy", "wall time"]
    assert rows[0][1] == "after RL     50.0%"


def test_a_model_is_missed_only_where_one_was_trained() -> None:
    for phase, expected in (("grpo train", [("model", "none was saved")]), ("explore", [])):
        rows = summary_rows(Summary(phases={phase: 1.0}))
        assert [row for row in rows if row[0] == "model"] == expected


def test_a_mean_reward_is_not_called_an_accuracy() -> None:
    rows = summary_rows(Summary(accuracy_before=0.25, accuracy_rl=1.5, measure="reward"))
    assert rows[0] == ("reward", "before       0.250")
    assert rows[1] == ("", "after RL     1.500   +1.250")
