"""What a reader pastes from the documents runs: Python on a scripted engine, commands as parsed.

README's blocks run in tests/e2e/test_readme.py; YAML goes through the loader in
tests/test_documents.py.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from tests.config.made import plan_of
from tests.data.made import selection_of
from tests.model.fake import make
from tests.test_documents import BLOCK, DOCUMENTS, ROOT, blocks_of
from trireme import Experience, Task
from trireme.cli.main import app
from trireme.config.memory import GIB
from trireme.data.rows import DataSet
from trireme.extensions import KINDS
from trireme.model.tool_calls import format_of
from trireme.pipeline.operators import make_operator
from trireme.registry import (
    CONTEXT_MANAGERS,
    ENVS,
    MEMORY_PLANNERS,
    MULTI_TURNS,
    OPERATORS,
    REWARDS,
    TASK_OPERATORS,
    WORKFLOWS,
)
from trireme.workflows.workflow import resolve

USER = [{"role": "user", "content": "?"}]
Page = Callable[[str], ModuleType]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """A page's Python blocks as one plug-in file, with a registry that forgets it afterwards."""
    for registry in (REWARDS, WORKFLOWS, MULTI_TURNS, ENVS, CONTEXT_MANAGERS):
        others = {k: v for k, v in registry._registered.items() if k not in ("again", "guess")}
        monkeypatch.setattr(registry, "_registered", others)
    monkeypatch.syspath_prepend(tmp_path)

    def load(name: str) -> ModuleType:
        module = f"page_{Path(name).stem}"
        (tmp_path / f"{module}.py").write_text(blocks_of(name))
        sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return importlib.import_module(module)

    return load


def test_data(page: Page) -> None:
    module = page("data.md")
    rows = [(0.3,), (0.9,), (0.1,)]
    order = selection_of("page_data:hardest_first", 3, features=rows).select(3)
    assert list(order) == [2, 0, 1]
    data = DataSet("count:3")
    assert module.Count().takes(data) and module.Count().read(data)[2]["prompt"] == "2 + 1?"


def test_the_page_on_extensions_lists_every_table() -> None:
    text = (ROOT / "docs" / "extensions.md").read_text(encoding="utf-8")
    tables = text.partition("## Extension points")[2].partition("## Keys")[0]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", tables, re.M)))
    assert sorted(listed) == sorted(KINDS)


@pytest.mark.extension("http")
def test_extensions(page: Page) -> None:
    from fastapi.testclient import TestClient

    from trireme.ext.http.app import FastAPI
    from trireme.ext.http.rollouts import Rollouts

    module = page("extensions.md")
    values = {"baskets": 8}
    assert module.OldShop().keys(values) == ["baskets is read as buffer.batch_size"]
    assert values == {"buffer": {"batch_size": 8}}

    hours = module.Hours(0)
    asyncio.run(hours.notify("on_step_end", 3))
    assert hours.ended_by == "the shop closed at step 3"

    model = make(["hi"])
    app = FastAPI()
    app.include_router(module.stock(Rollouts(model.engine, model.chat_tokens, "fake", 64)))
    assert TestClient(app).get("/stock").json() == {"model": "fake", "max_model_len": 64}


@pytest.mark.extension("http")
def test_a_plug_in_replaces_the_memory_planner(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = page("extensions.md")
    monkeypatch.setattr(MEMORY_PLANNERS, "_registered", {"estimate": module.measured})
    plan = plan_of(tmp_path)
    assert plan.memory.gradient_checkpointing and plan.memory.needs["weights"] == 16 * GIB
    rank = SimpleNamespace(tokens=8000, free=24 * GIB)
    _, findings = module.measured(None, None, rank)
    assert [problem.key for problem in findings.problems] == ["trainer.max_token_len_per_gpu"]


def test_rollout_server(page: Page) -> None:
    page("rollout_server.md")
    read = format_of("page_rollout_server:call_lines").read
    text, [call] = read('Hm.\nCALL {"name": "price", "arguments": {"item": "eggs"}}', [])
    assert (text, call.name, call.arguments) == ("Hm.", "price", {"item": "eggs"})
    assert read("CALL {", [])[1][0].error


@pytest.mark.extension("multi_turn")
def test_multi_turn(page: Page) -> None:
    from trireme.ext.multi_turn.loss_scale import resolve as scales_of

    page("multi_turn.md")
    [split] = scales_of("last_round+page_multi_turn:conclusion_counts_double")
    assert split("6 x 7 #### 42", True) == [("6 x 7 ", 1.0), ("#### 42", 2.0)]
    assert split("6 x 7", True) == [("6 x 7", 1.0), ("", 2.0)]


def test_pipeline(page: Page) -> None:
    page("pipeline.md")
    experiences = [Experience([1] * n, prompt_length=1) for n in (3, 9)]
    brief = make_operator(OPERATORS, "page_pipeline:brief_enough", {"most": 4}, "operators[0]")
    assert brief.function(experiences) == (experiences[:1], {"dropped": 1})
    short = make_operator(TASK_OPERATORS, "page_pipeline:not_too_long", {"most": 2}, "key")
    assert short.function([{"question": "a"}, {"question": "abc"}]) == [{"question": "a"}]


def test_rewards(page: Page) -> None:
    module = page("rewards.md")
    task = Task({"response": "6", "level": 2})
    assert module.harder_counts_more(task, "6", level=task.level) == 2.0
    chat = [[{"role": "assistant", "content": text}] for text in ("6", "7")]
    assert module.right([], chat, ["6", "6"]) == module.right([], ["6", "7"], ["6", "6"]) == [1, 0]
    assert REWARDS.get("brief")(Task({}), "abc", most=2) == {"brief": 0.0}


@pytest.mark.extension("http")
def test_agents(page: Page, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trireme.ext.http.gateway import Gateway
    from trireme.ext.http.rollouts import Rollouts

    module = page("agents.md")
    (tmp_path / "result.txt").write_text("6\n")
    assert module.tests_pass(Task({"response": "6"}), "", workdir=str(tmp_path)) == 1.0

    async def main() -> list[Experience]:
        model = make(["It is 6.", "6"])
        rollouts = Rollouts(model.engine, model.chat_tokens, "fake", model.max_model_len)
        gateway = model._gateway = (held := Gateway(rollouts)).address
        assert gateway is not None
        try:
            found = await resolve("my_agent").call(
                Task({"prompt": "?", "response": "6"}), model, 1, 0
            )
            for name, value in model.address.environment.items():
                monkeypatch.setenv(name, value)
            task = tmp_path / "task.json"
            task.write_text('{"prompt": "2 x 3?"}')
            monkeypatch.setenv("TRIREME_TASK", str(task))
            await asyncio.to_thread(module.main)
            return found
        finally:
            await held.close()

    [experience] = asyncio.run(main())
    assert experience.reward == 1.0 and capsys.readouterr().out == "6\n"


USAGE: Any = typer.BadParameter.__mro__[1]
"""A wrong command line: click's UsageError, which typer has no name for."""
COMMANDS = [
    pytest.param(line, id=f"{document.relative_to(ROOT)}: {line[:60]}")
    for document in DOCUMENTS
    for language, text in BLOCK.findall(document.read_text(encoding="utf-8"))
    if language == "bash"
    for line in text.replace("\\\n", " ").splitlines()
    if line.split("#")[0].strip()
]
SHOWN = {
    name
    for document in DOCUMENTS
    for name in re.findall(r"`(lab/\w+\.py)`", document.read_text(encoding="utf-8"))
}
"""Files that tutorials have their reader write; tests/e2e/test_tutorials.py runs them."""
NOT_RUN = {
    "ray": "Ray's own command line",
    "alfworld-download": "ALFWorld's own",
    "python3": "verl's command line",
    "swift": "ms-swift's own",
    "docker": "not on every machine; tests/test_package.py lints the images",
    "nvidia-smi": "the driver's own",
    ".venv-vllm-cuda/bin/python": "for GPUs; tests/ext/vllm/test_kind.py holds its constraints",
    "sed": "tests/e2e/test_tutorials.py runs it",
    **dict.fromkeys(("cd", "export", "source", "git"), "the shell's"),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one_that_there_is(line: str) -> None:
    """Parsed by the program itself; scripts, modules, targets, extras and YAMLs exist."""
    line = re.sub(r"<[\w ]+>", "placeholder", line)
    first, *words = shlex.split(line.rstrip("& "), comments=True)
    for word in words:
        if word.startswith("examples/") and not word.startswith("examples/checkpoints"):
            assert (ROOT / word).exists(), word
    first = first.removeprefix(".venv/bin/")
    if first in ("trireme", "trinity"):
        group: Any = typer.main.get_command(app)
        if words[0].startswith("-"):
            assert words[0] in [option for each in group.params for option in each.opts]
            return
        try:
            command = group.get_command(typer.Context(group), words[0])
            assert command is not None, words[0]
            command.make_context(words[0], words[1:])
        except USAGE as error:
            if "is not here" not in str(error):  # of an extension, which the sentence names
                raise
    elif first == "python" and words[0] == "-m":
        assert words[1] in ("venv", "pip") or importlib.util.find_spec(words[1]), words[1]
    elif first == "python":
        assert (ROOT / words[0]).is_file() or words[0] in SHOWN, words[0]
    elif first == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(
            re.search(rf"^{target}:", makefile, re.M) for target in words if "=" not in target
        )
    elif first == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = re.findall(r"(?:\.|trireme-rl)\[([\w,-]+)\]", line)
        assert {e for text in wanted for e in text.split(",")} <= {*extras["optional-dependencies"]}
    else:
        assert first in NOT_RUN, f"{first}: check it here, or say why not in NOT_RUN"
