"""`trireme algorithms` and the page of the same tables."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from trireme.cli.listing import algorithms
from trireme.registry import ALGORITHMS, POLICY_LOSSES

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "algorithms_page.py"))


def test_every_algorithm_is_listed_with_its_parts_and_formulas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert algorithms() == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ALGORITHMS.built_in():
        assert any(line.split()[:1] == [name] for line in lines), name
    for name in POLICY_LOSSES.built_in():
        [line] = [x for x in lines if x.split()[:2] == ["policy_loss_fn", name]]
        assert len(line.split()) > 4, f"{name} has no formula"
    assert any(line.startswith("ppo ") and line.endswith("critic, reference") for line in lines)


def test_one_algorithm_is_listed_with_its_own_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert algorithms(chosen=["dapo"]) == 0
    said = capsys.readouterr().out
    assert "\ngrpo " not in said and said.count("\ndapo ") == 2
    parts = [line.split()[:2] for line in said.splitlines() if line.startswith("advantage_fn ")]
    assert parts == [["advantage_fn", "dapo"]]
    assert algorithms(chosen=["gpro"]) == 2
    assert "there is no algorithm 'gpro'; did you mean 'gspo'?" in capsys.readouterr().err


def test_the_user_s_own_are_listed_with_their_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", "")
    (tmp_path / "listed_plugin.py").write_text(
        'from trireme import algorithm\nalgorithm("listed_rl", advantage="grpo", kl="none")\n'
    )
    assert algorithms([tmp_path]) == 0
    assert any(line.startswith("listed_rl ") for line in capsys.readouterr().out.splitlines())
    (tmp_path / "broken_listed.py").write_text("1 / 0")
    assert algorithms([tmp_path]) == 2
    assert "broken_listed.py" in capsys.readouterr().err


@pytest.mark.whole
def test_the_documentation_page_is_up_to_date() -> None:
    page = PAGE["PAGE"].read_text(encoding="utf-8")
    assert page == PAGE["document"](), "run: python scripts/algorithms_page.py"
