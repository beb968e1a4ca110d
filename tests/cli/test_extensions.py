"""`trireme extensions`, and a command that the package of a third party adds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.limits import HANG_S
from tests.test_extensions import fresh, install
from trireme.cli import main
from trireme.cli.listing import extensions

__all__ = ["fresh"]

SHOP = """
about = "A shop to search in."
needs = ["typer", "no-such-package"]
uses = ["mall", "stock"]

[command]
shop = "things:shop"

[workflow]
shop_workflow = "things:Shop"
"""
CODE = '''
import typer


def shop(name: str, price: int = 1) -> None:
    """Open the shop. And more."""
    print(f"{name} at {price}")
    raise typer.Exit(5)
'''


def test_each_extension_is_listed_with_what_it_needs_and_adds(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fresh, "shop", SHOP)
    install(fresh, "stock", 'about = "Goods."')
    assert extensions() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["shop", "A", "shop", "to", "search", "in."] in rows
    assert ["stock", "Goods."] in rows
    [installed] = [row for row in rows if row[:2] == ["shop", "typer"]]
    assert installed[2][0].isdigit()
    assert ["shop", "no-such-package", "no"] in rows
    assert ["shop", "extension", "mall", "no"] in rows
    assert ["shop", "extension", "stock", "yes"] in rows
    assert ["shop", "command", "shop"] in rows
    assert ["shop", "workflow", "shop_workflow"] in rows


def test_a_package_of_others_adds_a_command(fresh: Path) -> None:
    install(fresh, "shop", SHOP, CODE)
    (fresh / "package_shop" / "__init__.py").write_text("")

    def trireme(*words: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.path.insert(0, {str(fresh)!r})\n"
            "from trireme.cli.main import main; main()"
        )
        return subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=HANG_S
        )

    assert "\n  shop        Open the shop.\n" in trireme("--help").stdout
    opened = trireme("shop", "books", "--price", "3")
    assert (opened.returncode, opened.stdout) == (5, "books at 3\n")
    assert trireme("shop").returncode == 2
    listed = [line.split() for line in trireme("extensions").stdout.splitlines()]
    assert ["shop", "command", "shop"] in listed


def test_a_command_of_an_extension_that_is_not_here_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trireme.extensions.needed_for", lambda *name: {("command", "vjew"): "page"}.get(name)
    )
    done = CliRunner().invoke(main.app, ["vjew", "--plain"])
    assert done.exit_code == 2
    assert "The command vjew needs the extension 'page', which is not here" in done.output
    assert "No such command 'vjow'" in CliRunner().invoke(main.app, ["vjow"]).output
