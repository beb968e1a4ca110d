"""Numbers are written as people read them."""

from __future__ import annotations

from trireme.monitor.figures import clock_time, duration, figures, in_one_line, sparkline


def test_times_are_written_as_clocks_and_seconds() -> None:
    assert [clock_time(s) for s in (0, 59.6, 127, 3727)] == ["0:00", "1:00", "2:07", "1:02:07"]
    assert [duration(s) for s in (0.412, 12.4, 150)] == ["0.41 s", "12 s", "2:30"]


def test_failures_are_shown_only_where_there_are_some() -> None:
    assert figures({"rollout/failed": 0.0}, "training") == []
    assert figures({"rollout/failed": 3.0}, "training") == [("failed", "3")]


def test_a_loss_is_shown_where_it_says_something() -> None:
    assert figures({"actor/sft_loss": 1.25}, "training") == [("loss", "1.25")]
    assert figures({"actor/dpo_loss": 0.7}, "training") == [("loss", "0.7")]
    # on-policy it is minus the mean advantage, about 0: the gradient tells of learning
    rl = {"actor/pg_loss": -0.002, "actor/grad_norm": 0.125}
    assert figures(rl, "training") == [("grad", "0.12")]


def test_an_evaluation_shows_mean_and_best_but_no_spread() -> None:
    metrics = {
        "accuracy/mean@4": 0.5,
        "accuracy/std@4": 0.1,
        "accuracy/best@4": 0.75,
        "accuracy/worst@4": 0.2,
        "tasks": 8.0,
        "failed": 0.0,
    }
    assert figures(metrics, "evaluation") == [
        ("accuracy (mean@4)", "50.0%"),
        ("accuracy (best@4)", "75.0%"),
        ("tasks", "8"),
    ]


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=10) == "▁▅█"
    assert sparkline([1.0, 1.0], width=10) == "▁▁"
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"


def test_text_of_a_rollout_fits_one_line() -> None:
    assert in_one_line("a\nb\x1b[31mc", 100) == "a ⏎ b [31mc"
    short = in_one_line("x" * 50 + "y" * 50, 23)
    assert short == "x" * 10 + " … " + "y" * 10
