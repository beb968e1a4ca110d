"""Registry: who wins when a name is known twice, and what is said of an unknown one."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import MutableMapping
from pathlib import Path

import pytest

import trireme.registry
from trireme.extensions import KINDS
from trireme.registry import Registry, did_you_mean


def make() -> Registry:
    return Registry("workflow", {"counter": "collections.Counter", "broken": "no_such_module.X"})


def test_built_in_names_and_dotted_paths_are_imported_on_first_use() -> None:
    from collections import OrderedDict

    registry = make()
    assert registry.get("counter") is Counter
    assert registry.get("collections.OrderedDict") is OrderedDict
    assert registry.get("collections:OrderedDict") is OrderedDict
    assert registry.get(None) is None


def test_a_users_name_overrides_a_built_in_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = make()
    with caplog.at_level(logging.WARNING):

        @registry.register_module("counter")
        class Mine: ...

    assert registry.get("counter") is Mine
    assert "'counter' of" in caplog.text and "replaces the built-in one" in caplog.text


def test_two_users_names_collide_loudly() -> None:
    registry = make()
    registry.register_module("mine", int)
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        registry.register_module("mine", str)
    registry.register_module("mine", str, force=True)
    assert registry.get("mine") is str


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown workflow 'countr'; did you mean 'counter'\?"):
        make().get("countr")
    with pytest.raises(ValueError, match="there is no module 'no_such_module'"):
        make().get("broken")
    with pytest.raises(ValueError, match=r"has no 'Countr'; did you mean 'Counter'\?"):
        make().get("collections.Countr")


def test_a_function_that_its_module_does_not_register_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_counting.py"
    file.write_text("from trireme.text import storable\ndef counts(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_counting")
    write = f"unknown workflow 'counts', which {file} has but does not register; write "
    with pytest.raises(ValueError, match=re.escape(f"{write}'my_counting:counts'. Known: broken")):
        make().get("counts")
    with pytest.raises(ValueError, match=r"unknown workflow 'storable'\. Known"):  # it imports it
        make().get("storable")
    assert make().get("my_counting:counts")("") == 1.0


def test_a_misspelt_file_gets_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for path in ("my_reward:right", "my_rewards.py:right"):
        with pytest.raises(ValueError, match=r"no module '.*'; did you mean 'my_rewards:right'\?"):
            make().get(path)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("./scores.py:right", "did you mean 'scores:right'?"),
        ("{cwd}/scores.py:right", "did you mean 'scores:right'?"),
        ("rewards/scores.py:right", "did you mean 'rewards.scores:right'?"),
        (
            "/elsewhere/scores.py:right",
            "expected 'scores:right', and plugins: [/elsewhere/scores.py]",
        ),
        ("~/scores.py:right", "expected 'scores:right', and plugins: [/home/me/scores.py]"),
        ("scores.py", "did you mean 'scores:NAME'?"),
        ("rewards/scores.py", "did you mean 'rewards.scores:NAME'?"),
    ],
)
def test_a_path_of_a_file_is_told_what_to_write_for_it(
    path: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ValueError, match="there is no module") as raised:
        make().get(path.format(cwd=tmp_path))
    assert instead in str(raised.value)


def test_a_file_in_the_working_folder_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file_in_folder.py").write_text("thing = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert Registry("thing").get("file_in_folder:thing") == 3


REGISTRIES = [thing for thing in vars(trireme.registry).values() if isinstance(thing, Registry)]


def test_every_kind_of_name_has_one_registry() -> None:
    looked_up = [kind for kind in KINDS if kind != "public"]  # these are attributes of trireme
    assert Counter(registry._kind for registry in REGISTRIES) == Counter(looked_up)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda given: given.name)
def test_every_built_in_name_can_be_looked_up(registry: Registry) -> None:
    assert all(registry.get(name) is not None for name in registry.built_in())


@pytest.mark.extension("multi_turn")
def test_a_user_may_give_a_built_in_name_to_another_thing_of_ours() -> None:
    code = (
        "from trireme.registry import ALGORITHMS, REWARDS\n"
        "from trireme.rewards.math import format_reward\n"
        "from trireme.registry import SCALES\n"
        "from trireme.ext.multi_turn.loss_scale import by_patterns\n"
        "for registry, name, thing in (\n"
        "    (REWARDS, 'math_reward', format_reward),\n"
        "    (SCALES, 'react', by_patterns(('x', 0.0))),\n"
        "    (ALGORITHMS, 'grpo', ALGORITHMS.get('ppo')),\n"
        "):\n"
        "    assert registry.get(name) is not thing\n"
        "    registry.register_module(name, thing)\n"
        "    assert registry.get(name) is thing, name\n"
        "REWARDS.register_module('mine', format_reward)\n"
        "assert 'mine' not in REWARDS.built_in()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "'math_reward' of " in done.stderr and done.stderr.count("replaces the built-in one") == 3
    )


def test_only_the_file_that_gives_a_name_is_imported() -> None:
    code = (
        "import sys\n"
        "from trireme.registry import MULTI_TURNS, REWARDS, SELECTORS, WORKFLOWS\n"
        "mine = WORKFLOWS.register('mine')(print)\n"
        "assert WORKFLOWS.get('mine') is print and 'tool_call_workflow' in WORKFLOWS.names()\n"
        "assert 'torch' not in sys.modules and SELECTORS.get('shuffle')\n"
        "assert 'trireme.data.selectors' in sys.modules and 'torch' not in sys.modules\n"
        "assert WORKFLOWS.get('math_workflow')\n"
        "assert 'trireme.pipeline.operators' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_users_name_stays_when_the_file_of_the_built_in_one_is_imported_later() -> None:
    code = (
        "from trireme.registry import SELECTORS\n"
        "SELECTORS.register('shuffle')(dict)\n"
        "import trireme.data.selectors\n"
        "assert SELECTORS.get('shuffle') is dict\n"
        "assert SELECTORS.built_in()[:2] == ['sequential', 'shuffle']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'shuffle' of builtins:dict replaces the built-in one" in done.stderr


def test_a_users_path_goes_over_a_built_in_name() -> None:
    registry = Registry("thing", kind="data_selector")
    registry.adopt(Registry("thing", default_mapping={"shuffle": "collections.Counter"}))
    assert registry.get("shuffle") is Counter


def _mapping() -> Registry:
    paths = {"sequential": "collections.Counter", "shuffle": "collections.OrderedDict"}
    return Registry("thing", paths)


def test_a_registry_is_a_mapping_of_built_in_names_and_users() -> None:
    registry = _mapping()
    assert isinstance(registry, MutableMapping) and list(registry) == ["sequential", "shuffle"]
    registry.update({"mine": int}, other=float)
    registry |= {"third": str}
    assert [*registry.keys()] == ["sequential", "shuffle", "mine", "other", "third"]
    assert len(registry) == 5 and [*registry.values()] == [Counter, OrderedDict, int, float, str]
    assert dict(registry.items())["mine"] is int
    assert registry["shuffle"] is registry.get("shuffle", None)
    assert registry.get("nothing", 3) == 3 and registry.get("nothing", None) is None
    assert registry.setdefault("mine", bool) is int and registry.pop("mine") is int
    assert "mine" not in registry and registry.pop("mine", None) is None
    assert registry | {"late": 1} == {**registry, "late": 1}


def test_an_unknown_name_is_a_key_error_whose_sentence_has_no_quotes() -> None:
    for ask in (lambda: _mapping()["shufle"], lambda: _mapping().get("shufle")):
        with pytest.raises(KeyError) as caught:
            ask()
        assert str(caught.value).startswith("unknown thing 'shufle'; did you mean 'shuffle'?")
    with pytest.raises(KeyError, match="'shufle' is not there"):
        del _mapping()["shufle"]


def test_a_built_in_name_can_be_removed_and_given_again() -> None:
    registry = _mapping()
    del registry["shuffle"]
    assert "shuffle" not in registry and "shuffle" not in registry.names()
    with pytest.raises(ValueError, match="thing 'shuffle' was removed by a plug-in"):
        registry.get("shuffle")
    registry["shuffle"] = dict
    assert registry["shuffle"] is dict


def test_of_two_things_that_are_set_by_item_the_last_counts_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = _mapping()
    with caplog.at_level(logging.WARNING):
        registry["mine"] = int
        registry["mine"] = int
        assert not caplog.text
        registry["mine"] = str
    assert registry["mine"] is str
    assert "'mine' of builtins:str replaces that of builtins:int" in caplog.text


def test_a_name_in_other_letters_is_near() -> None:
    for name in ("PPO", "GRPO_"):
        assert did_you_mean(name, ["ppo", "grpo"], "{}") == name.lower().strip("_")
    assert did_you_mean("question", ["Question", "x"], "{}") == "Question"
    assert did_you_mean("PPO", ["dapo_x"]) == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nreturn (1\n", "SyntaxError: '(' was never closed ({file}, line 2)"),
        ("\nimport no_such_package\n",
         "ModuleNotFoundError: No module named 'no_such_package' ({file}, line 2)"),
        ("import json\njson.loads('[')\n", "JSONDecodeError: Expecting value"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 ({file}, line 2)"),
    ],
)  # fmt: skip
def test_a_users_module_that_fails_to_load_is_one_sentence_with_its_line(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fails_to_load.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as raised:
        make().get("fails_to_load:play")
    sentence = str(raised.value)
    assert sentence.startswith("workflow 'fails_to_load:play': module 'fails_to_load' fails to lo")
    assert said.format(file=file) in sentence
    assert sentence.endswith(f"({file}, line 2)")


def test_a_number_in_place_of_a_name_is_no_path() -> None:
    with pytest.raises(ValueError, match=r"unknown workflow '0\.04'\. Known: broken, counter"):
        make().get("0.04")


def test_a_name_that_is_no_text_is_refused() -> None:
    """A decorator without its parentheses put a function of ours in place of the user's."""

    def guess() -> None: ...

    with pytest.raises(ValueError, match=r"workflow: a name is <function .*, in parentheses: \("):
        make().register(guess)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"workflow: a name is \{'name': 'a'\}: expected text$"):
        make().register_module({"name": "a"}, guess)  # type: ignore[arg-type]
