"""The command line takes what the documents say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import trireme
from tests.limits import HANG_S
from trireme.cli.main import app, command_line
from trireme.registry import COMMANDS

PLAIN = {"compare": False, "fresh": False, "strict": False}
STUBBED = ("run", "check", "algorithms", "workflows", "log")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each command was called with; each returns 3."""
    seen: dict[str, Any] = {}
    for name in STUBBED:
        module = ModuleType(f"trireme.cli.{name}")

        def command(*args: Any, name: str = name, **options: Any) -> int:
            flags = options.pop("flags", None)
            rewrite = options.pop("named", None)
            assert not flags and (rewrite is None or rewrite([]) == [])
            seen[name] = (*args, options) if options else args
            return 3

        setattr(module, name, command)
        vars(module).update(add_plugin_dirs=lambda folders: None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def invoke(*args: str) -> int:
    return CliRunner().invoke(app, list(args)).exit_code


def test_run_takes_a_config_overrides_and_plugin_folders(called: dict[str, Any]) -> None:
    code = invoke("run", "--config", "x.yaml", "a.b=1", "c=d", "--plugin-dir", "p",
                  "--plugin-dir", "q")  # fmt: skip
    assert code == 3
    assert called["run"] == (Path("x.yaml"), ["a.b=1", "c=d"], [Path("p"), Path("q")], PLAIN)


def test_the_yaml_may_be_a_plain_word(called: dict[str, Any]) -> None:
    assert invoke("run", "x.yaml", "a.b=1") == 3
    assert called["run"] == (Path("x.yaml"), ["a.b=1"], [], PLAIN)
    assert invoke("check", "a.b=1", "x.yml") == 3
    assert called["check"] == (Path("x.yml"), ["a.b=1"], {"strict": False})
    assert invoke("check", "@", "rl.toml") == 3  # as prime-rl names a file
    assert called["check"] == (Path("rl.toml"), [], {"strict": False})
    assert invoke("run", "@") == 2


def test_the_version_is_told_also_by_the_module() -> None:
    words = [sys.executable, "-m", "trireme", "--version"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S).stdout
    assert (
        said == CliRunner().invoke(app, ["--version"]).output == f"trireme {trireme.__version__}\n"
    )


def test_run_alone_is_the_demo(called: dict[str, Any]) -> None:
    assert invoke("run") == 3
    assert called["run"] == (None, [], [], PLAIN)
    assert invoke("run", "--compare") == 3
    assert called["run"] == (None, [], [], PLAIN | {"compare": True})


def test_check_takes_its_short_options(called: dict[str, Any]) -> None:
    assert invoke("check", "-c", "x.yaml", "a=1") == 3
    assert called["check"] == (Path("x.yaml"), ["a=1"], {"strict": False})


def test_log_takes_the_options_of_the_vocabulary(called: dict[str, Any]) -> None:
    assert invoke("log", "-d", "job", "-k", "sync", "-l", "ERROR", "-n", "5", "-p", "ex*") == 3
    options = {"keyword": "sync", "level": "ERROR", "last": 5, "pattern": "ex*", "color": True}
    assert called["log"] == (Path("job"), None, options)


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert len(COMMANDS) >= 7 and all(f"\n  {name} " in shown for name in COMMANDS)


def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        monkeypatch.setenv("_TRIREME_COMPLETE", "complete_bash")
        return CliRunner().invoke(app, [], prog_name="trireme").output.split()

    assert completed("trireme che") == ["check"]
    assert {"--fresh", "--strict", "--config"} <= set(completed("trireme run --"))


def test_an_unknown_command_or_option_is_an_error() -> None:
    assert invoke("rum") == 2
    assert invoke("run", "--confg", "x.yaml") == 2


@pytest.mark.parametrize(
    ("word", "meant"),
    [("train", "run"), ("trian", "run"), ("chekc", "check"), ("my.yaml", "trireme run my.yaml")],
)
def test_an_unknown_command_is_answered_with_the_nearest(word: str, meant: str) -> None:
    said = CliRunner().invoke(app, [word]).output
    assert said.count(f"No such command '{word}'. Did you mean '{meant}'?") == 1


@pytest.mark.parametrize(
    "words", [("check", "run.yaml", f"checkpoint_root_dir={'n' * 300}"), ("log", "n" * 300)]
)
def test_a_name_that_no_file_system_stores_is_an_error_and_no_traceback(
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {model_path: none}")
    monkeypatch.setattr(sys, "argv", ["trireme", *words])
    with pytest.raises(SystemExit, match="2"):
        command_line()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("error: ") and ": expected names of at most 255 bytes" in said


def test_a_command_is_imported_when_it_is_chosen() -> None:
    code = (
        "import sys; sys.argv = ['trireme', 'log', '--help']\n"
        "from trireme.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*[m for m in sys.modules if m.startswith('trireme.cli.commands.')])"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S).stdout
    assert said.splitlines()[-1] == "trireme.cli.commands.log"


@pytest.fixture
def shop() -> Iterator[str]:
    """The name of a command that a test may register."""
    yield "shop"
    del COMMANDS["shop"]


def test_a_command_that_cannot_be_imported_says_so_and_the_others_work(shop: str) -> None:
    COMMANDS.register_module(shop, "no_such_shop.command:sell", lazy=True)
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "shop        The command shop cannot be imported" in shown
    assert all(name in shown for name in COMMANDS)
    chosen = CliRunner().invoke(app, [shop, "a.yaml", "--price", "3"])
    assert chosen.exit_code == 2
    assert "no module 'no_such_shop.command'" in " ".join(chosen.output.split())


def test_a_command_may_be_an_app_of_several(shop: str) -> None:
    several = typer.Typer(help="Buy and sell.", add_completion=False, rich_markup_mode=None)

    @several.command()
    def buy(price: int) -> None:
        raise typer.Exit(price)

    @several.command()
    def sell() -> None:
        """Sell it."""

    COMMANDS.register(shop)(several)
    assert "shop        Buy and sell." in CliRunner().invoke(app, ["--help"]).output
    assert "Sell it." in CliRunner().invoke(app, [shop, "--help"]).output
    assert invoke(shop, "buy", "7") == 7
