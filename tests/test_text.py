"""Text of others: nothing of it commands a terminal, and there is one place for each way out."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.odd import ALL, ODD
from trireme.experience import EID
from trireme.log import get_logger, setup_logging, write_failure
from trireme.monitor.terminal import Terminal
from trireme.text import as_json, has_half, joined, say, shown, storable

ROOT = Path(__file__).parent.parent / "trireme"
PRINT_FOR_PROGRAMS = {
    "text.py",  # `say` itself
    "ext/http/process.py",  # a line of JSON for the parent
    "ext/sandbox/programs.py",  # the same, of the child that runs a program
}
COMMANDS = {*range(32), 127, *range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
COMMANDS -= {ord("\t"), ord("\n")}


def commands_in(text: str) -> set[int]:
    """What a terminal or an encoder would not take as text."""
    return {ord(c) for c in text if ord(c) in COMMANDS or 0xD800 <= ord(c) < 0xE000}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_every_way_out_takes_every_text(text: str) -> None:
    assert json.loads(as_json({text: [text]})) == json.loads(json.dumps({text: [text]}))
    as_json(text).encode()
    assert storable(storable(text)) == storable(text)
    assert "\0" not in storable(text)
    storable(text).encode()
    assert commands_in(shown(text)) == set()
    assert shown(shown(text)) == shown(text)
    joined(text).encode()
    assert not has_half({text: [joined(text)]}) or has_half(text)


def test_what_stands_for_a_character_says_which_it_was() -> None:
    assert storable("a\0b\ud83d") == "a\u2400b\\ud83d"
    assert shown("\x1b[31m\x07\x7f\x9b \u202e \u2028 caf\udce9") == (
        "\u241b[31m\u2407\u2421\\x9b \\u202e \\u2028 caf\\udce9"
    )
    assert shown("one\r\ntwo\rthree\tfour") == "one\ntwo\u240dthree\tfour"
    assert joined("\ud83d\ude00 \ud83d") == "\U0001f600 \ufffd"
    same = "\U0001f600 שלום \u200f é 漢字 \u200d"
    assert [f(same) for f in (storable, shown, joined)] == [same] * 3


def test_ids_are_names_that_a_database_takes() -> None:
    eid = EID("3/held\0out", "\ud83d", 1, 2, "\0")
    assert eid.uid == "3/held\u2400out/\\ud83d/1/2/\u2400"


def test_log_files_and_the_console_take_every_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    close = setup_logging(tmp_path, "INFO")
    for number, text in enumerate(ODD.values()):
        get_logger().warning(f"{number}: %s", text)
        get_logger("trainer").error(text)
    close()
    path = write_failure(tmp_path, ValueError(ALL))
    assert path is not None
    for file in (path, tmp_path / "launcher.log", tmp_path / "trainer.log"):
        assert commands_in(file.read_text(encoding="utf-8")) == set()
    said = capsys.readouterr().err
    assert "0: cut \\ud83d" in said and commands_in(said) == set()


@pytest.mark.parametrize("colours", [False, True])
def test_a_terminal_shows_control_characters_and_has_its_own(colours: bool) -> None:
    out = io.StringIO()
    terminal = Terminal(
        file=out, force_terminal=colours, width=4000, color_system="standard" if colours else None
    )
    terminal.print(Text(ALL, "red"), soft_wrap=True)
    table = Table("a")
    table.add_row(ALL)
    terminal.print(table)
    if colours:
        with Live(Text(ALL), console=terminal, transient=True):
            say(ALL)
    said = out.getvalue()
    said.encode()
    assert "\u241b]0;owned" in said and "\x1b]0;owned" not in said and "\x9b" not in said
    assert ("\x1b[31m" in said) is colours
    assert colours or commands_in(said) == set()


def test_an_error_of_ours_and_of_libraries_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trireme.cli import main as cli

    def fails() -> None:
        logging.getLogger("a.library").propagate = True
        assert logging.lastResort is not None
        record = logging.LogRecord("a.library", logging.WARNING, "", 0, ALL, (), None)
        print(logging.lastResort.format(record), file=sys.stderr)
        raise KeyError(ALL) from ValueError(ALL)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.command_line()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "ValueError: cut \\ud83d" in said
    assert commands_in(said) == set()


def test_text_leaves_by_one_door() -> None:
    others = []
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "print" and name not in PRINT_FOR_PROGRAMS:
                    others.append(f"{where}: print, expected say")
            elif isinstance(node, ast.keyword) and node.arg == "ensure_ascii":
                if name != "text.py":
                    others.append(f"{where}: ensure_ascii, expected as_json")
            elif isinstance(node, ast.ImportFrom) and node.module == "rich.console":
                made = "Console" in [alias.name for alias in node.names]
                others += [f"{where}: rich's Console, expected Terminal"] * made
    others = [one for one in others if not one.startswith("monitor/terminal.py")]
    assert not others, "\n".join(others)
