"""`trireme eval`: what models do on task sets, with the embedded engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.ext.external_model.server import Api
from tests.ext.external_model.server import api as api  # a fixture
from tests.limits import HANG_S
from trireme.cli.main import app
from trireme.config.stages import used_tasksets
from trireme.experience import Experience
from trireme.explorer.metrics import Evaluated, _evaluated
from trireme.explorer.runner import Failed, Outcome
from trireme.ext.evaluation.evaluate import EvalOptions, _api_of, _plan, _report, _tree, _values
from trireme.task import Task
from trireme.usercode import Fault


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["eval", *words])


def test_rows_without_a_truth_are_measured_by_a_reward_that_needs_none(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", "")
    (tmp_path / "own_length.py").write_text(
        "def long(task, answer):\n    return float(len(answer))\n"
    )
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question": "What is 1 + 1?"}\n')
    words = ["--tasks", str(asked), "--workflow", "simple_workflow", "--model", str(tiny_dir)]
    words += ["--reward", "own_length:long", "--plugin-dir", str(tmp_path), "--max-tokens", "4"]
    done = call(*words, "model.max_prompt_tokens=40")
    assert done.exit_code == 2 and "no column 'answer'" in done.output
    done = call(*words, "--response-key", "", "model.max_prompt_tokens=40")
    assert done.exit_code == 0, done.output


def test_two_models_are_measured_and_compared(
    tasks: Path, tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", "")  # set by --plugin-dir: for this test alone
    (tmp_path / "own_task.py").write_text(
        "def share_of_fs(task, answer):\n    return answer.count('f') / max(len(answer), 1)\n"
    )
    out = tmp_path / "out.json"
    done = call(
        *(
            "--tasks",
            f"sums={tasks}",
            "--workflow",
            "simple_workflow",
            "--plugin-dir",
            str(tmp_path),
        ),
        *("--reward", "own_task:share_of_fs", "--model", str(tiny_dir), "-m", str(tiny_dir)),
        *("-n", "4", "-k", "1", "-k", "4", "--success", "0.01", "--max-tokens", "8"),
        *("--out", str(out), "model.max_prompt_tokens=40"),
    )
    assert done.exit_code == 0, done.output
    lines = [re.split(r"  +", line.strip()) for line in done.output.splitlines()]
    names = [line[3] for line in lines if line[0] == str(tiny_dir) and len(line) == 6]
    assert names == ["reward mean@4", "pass@1", "pass@4"] * 2
    # the same weights and seed: nothing between them
    [gap] = [line for line in lines if line[:2] == ["sums", "reward mean@4"]]
    assert gap[2:] == ["+0.000", "+0.000 to +0.000", "1.000"]
    first, second = json.loads(out.read_text())
    assert first == second and len(first["values"]) == 4
    mean = sum(sum(values) / 4 for values in first["values"]) / 4
    assert first["estimates"]["reward mean@4"]["mean"] == pytest.approx(mean)
    assert all(len(values) == 4 for values in first["values"])


def test_columns_are_those_that_the_first_row_shows(tmp_path: Path, tiny_dir: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "solution": "2"}) + "\n")
    words = ["--tasks", str(path), "--model", str(tiny_dir), "--max-tokens", "4"]
    words += ["--workflow", "simple_workflow", "--reward", "math_reward"]
    done = call(*words, "model.max_prompt_tokens=40")
    assert done.exit_code == 0, done.output
    done = call(*words, "--prompt-key", "question", "model.max_prompt_tokens=40")
    assert done.exit_code == 2 and "no column 'question'" in done.output


def test_a_yaml_s_data_below_its_own_root_are_found(
    tasks: Path, tmp_path: Path, tiny_dir: Path
) -> None:
    (tmp_path / "own/data").mkdir(parents=True)
    tasks.rename(tmp_path / "own/data/tasks.jsonl")
    columns = {"prompt_key": "question", "response_key": "answer"}
    held_out = {"path": "${checkpoint_root_dir}/data/tasks.jsonl", "format": columns}
    config = {
        "checkpoint_root_dir": str(tmp_path / "own"),
        "model": {"model_path": "", "max_prompt_tokens": 40, "max_response_tokens": 4},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "math_reward",
                "taskset": held_out,
                "eval_tasksets": [{"name": "held_out", **held_out}],
            }
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    done = call("-c", str(path), "--model", str(tiny_dir))
    assert done.exit_code == 0, done.output
    assert [each.name for each in (tmp_path / "own").iterdir()] == ["data"]  # nothing is written


def test_a_model_behind_an_openai_api(
    tasks: Path, tiny_dir: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the key")
    done = call(
        *("--tasks", f"sums={tasks}", "--workflow", "math_boxed_workflow", "-n", "2"),
        *("--model", f"adder@{api}", "--max-tokens", "64"),
        *(f"model.model_path={tiny_dir}", "model.max_prompt_tokens=800"),
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"accuracy mean@2 +0\.500", done.output), done.output
    assert len(Api.asked) == 8
    assert {one["model"] for one in Api.asked} == {"adder"}
    assert {one["key"] for one in Api.asked} == {"Bearer the key"}
    assert Api.asked[0]["max_tokens"] == 64 and Api.asked[0]["messages"][-1]["role"] == "user"


def test_the_length_is_asked_under_the_name_that_the_api_takes(
    tasks: Path, tiny_dir: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "refused", "max_tokens")
    done = call(
        *("--tasks", f"sums={tasks}", "--workflow", "math_boxed_workflow", "-n", "1"),
        *("--model", f"adder@{api}", "--max-tokens", "64", f"model.model_path={tiny_dir}"),
        "model.max_prompt_tokens=800",
    )
    assert done.exit_code == 0, done.output
    answered = [one for one in Api.asked if "max_tokens" not in one]
    assert [one["max_completion_tokens"] for one in answered] == [64] * 4
    assert not any("temperature" in one or "top_p" in one for one in answered)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_tool_calls_of_an_api_are_run_and_their_results_sent(
    tasks: Path,
    tmp_path: Path,
    tiny_dir: Path,
    api: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    parser: str,
) -> None:
    asked = [{"expression": text} for text in ("6 * 7", "2 ** 5")]
    calls = [
        {"id": f"theirs_{n}", "type": "function",
         "function": {"name": "calculator", "arguments": json.dumps(arguments)}}
        for n, arguments in enumerate(asked)
    ]  # fmt: skip
    monkeypatch.setattr(Api, "calls", calls)
    tree = {
        "buffer": {"explorer_input": {
            "default_workflow_type": "multi_turn_scheduler",
            "eval_tasksets": [{
                "name": "sums", "path": str(tasks), "repeat_times": 2,
                "format": {"prompt_key": "question", "response_key": "answer"},
                "reward_fn_args": {"funcs": ["accuracy"]},
                "workflow_args": {"scheduler": "tool_call_scheduler", "tools": ["calculator"]},
            }],
        }},
    }  # fmt: skip
    config = tmp_path / "tools.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = call(
        *(str(config), "--model", f"adder@{api}", "--max-tokens", "64"),
        *(f"model.model_path={tiny_dir}", "model.max_prompt_tokens=800", "model.top_k=5"),
        f"explorer.rollout_model.tool_call_parser={parser}",
    )
    assert done.exit_code == 0, done.output
    assert "does not receive top_k (5)" in caplog.text
    assert len(Api.asked) == 16  # of 8 conversations
    told = [one["messages"] for one in Api.asked if one["messages"][-1]["role"] == "tool"]
    assert len(told) == 8
    *_, said, first, second = told[0]
    assert [json.loads(one["function"]["arguments"]) for one in said["tool_calls"]] == asked
    assert said["content"] is None and [first["content"], second["content"]] == ["42", "32"]
    ids = [one["id"] for one in said["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert {"<tool_call>" in json.dumps(one["messages"]) for one in Api.asked} == {False}


@pytest.mark.parametrize("ignored", ["", "trap '' INT; "], ids=["shell", "background"])
def test_a_signal_stops_it_and_leaves_no_folder(
    ignored: str,
    tasks: Path,
    tmp_path: Path,
    tiny_dir: Path,
    api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = Event(), Event()
    monkeypatch.setattr(Api, "do_POST", lambda handler: asked.set() or answer.wait(HANG_S))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["eval", "--tasks", f"sums={tasks}", "--workflow", "simple_workflow"]
    words += ["--reward", "math_reward", "--model", f"m@{api}", f"model.model_path={tiny_dir}"]
    # a script's `command &` ignores Ctrl-C, and everything that it starts does too
    command = ["sh", "-c", ignored + 'exec "$@"', "sh", sys.executable, "-m", "trireme", *words]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert asked.wait(HANG_S) and list(temporary.glob("trireme-eval-*"))
        running.terminate()
        _, said = running.communicate(timeout=HANG_S)
        answer.set()
    assert running.returncode == 128 + signal.SIGTERM and said.endswith("stopped\n")
    assert not list(temporary.glob("trireme-eval-*"))


def test_an_api_that_fails_ends_its_own_row_alone(
    tasks: Path, tmp_path: Path, tiny_dir: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "status", 401)  # which the client does not try again
    out = tmp_path / "out.json"
    done = call(
        *("--tasks", f"sums={tasks}", "--workflow", "math_boxed_workflow", "-n", "2"),
        *("--model", str(tiny_dir), "--model", f"adder@{api}", "--max-tokens", "8"),
        *("--model", str(tiny_dir), "--out", str(out), f"model.model_path={tiny_dir}"),
        "model.max_prompt_tokens=800",
    )
    assert done.exit_code == 1, done.output
    rows = [line.split() for line in done.output.splitlines() if " sums " in line]
    assert {row[0] for row in rows} == {str(tiny_dir)}
    assert f"{tiny_dir} compared with {tiny_dir}" in done.output
    assert "Error code: 401" in done.output
    assert len(json.loads(out.read_text())) == 2


def test_a_server_that_is_none_of_ours_is_one_sentence(
    tasks: Path,
    tiny_dir: Path,
    api: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(handler: Api) -> None:
        handler.send_response(404)
        handler.end_headers()
        handler.wfile.write(b"{}")

    monkeypatch.setattr(Api, "do_GET", answer, raising=False)
    done = call(
        *("--tasks", f"sums={tasks}", "--workflow", "math_boxed_workflow", "--max-tokens", "8"),
        *("--model", api.removesuffix("/v1"), f"model.model_path={tiny_dir}"),
        "model.max_prompt_tokens=800",
    )
    assert done.exit_code == 1 and done.output.count("is not a rollout server of Trireme's") == 1
    assert "rollout 0/sums" not in caplog.text + done.output


def test_a_single_task_has_no_interval_and_the_file_stays_json(tiny_dir: Path) -> None:
    options = EvalOptions([str(tiny_dir)])
    [one] = [Evaluated("sums", "reward", [[2.5]])]
    assert _report(options, [("a", [one])])[1].split()[-2:] == ["2.500", "-"]
    [written] = _values(options, [("a", [one])])
    assert written["estimates"] == {"reward mean@1": {"mean": 2.5, "low": None, "high": None}}


def test_the_file_has_the_failures_by_cause() -> None:
    one = Evaluated("sums", "reward", [[1.0, 0.0]], Counter({"reward 'mine': KeyError: 'x'": 1}))
    [written] = json.loads(json.dumps(_values(EvalOptions(["a"]), [("a", [one])])))
    assert written["failures"] == {"reward 'mine': KeyError: 'x'": 1}
    assert [written[key] for key in ("model", "taskset", "values")] == ["a", "sums", [[1.0, 0.0]]]


def test_models_with_different_measures_have_their_rows_and_are_not_compared() -> None:
    """A workflow may give an accuracy only for a reply that it can read."""
    options = EvalOptions(["a", "b"])
    same = Evaluated("same", "reward", [[0.5]])
    tasksets = [[Evaluated("sums", measure, [[1.0]]), same] for measure in ("reward", "accuracy")]
    lines = _report(options, list(zip("ab", tasksets, strict=True)))
    shown = [line.split()[:5] for line in lines]
    assert ["a", "sums", "1", "reward", "mean@1"] in shown
    assert ["b", "sums", "1", "accuracy", "mean@1"] in shown
    assert ["same", "reward", "mean@1", "+0.000", "-"] in shown
    assert lines[-1] == "sums is not compared: a is measured by reward, b by accuracy"


@pytest.mark.extension("swift")
def test_flags_that_run_takes_set_keys_of_the_yaml(
    tasks: Path, tmp_path: Path, tiny_dir: Path
) -> None:
    path = tmp_path / "run.yaml"
    columns = {"prompt_key": "question", "response_key": "answer"}
    held_out = {"name": "sums", "path": str(tasks), "format": columns}
    inputs = {"default_workflow_type": "simple_workflow", "eval_tasksets": [held_out]}
    path.write_text(yaml.safe_dump({"buffer": {"explorer_input": inputs}}))
    words = ["--model", str(tiny_dir), "--reward_funcs", "accurcy"]
    done = call(str(path), *words)
    assert done.exit_code == 2
    assert "--reward_funcs: buffer.explorer_input.eval_tasksets[0]" in done.output
    done = call("--tasks", str(tasks), *words)
    assert done.exit_code == 2
    assert "--reward_funcs sets keys of a YAML: expected one" in " ".join(done.output.split())


def test_help_says_what_the_yaml_is_for() -> None:
    said = " ".join(re.sub(r"[│╭╮╰╯─]", "", call("--help").output).split())
    assert "A YAML with eval_tasksets, instead of --tasks." in said and "demo" not in said


def test_more_failures_than_may_be_are_no_measurement() -> None:
    task = Task(repeat_times=2)
    fault = Fault("the workflow", "KeyError", "", lasting=False)
    outcome = Outcome(
        task, [Experience([1, 2], prompt_length=1, reward=1.0)], [Failed("0/0/1", "error", fault)]
    )
    assert _evaluated("sums", [outcome], 0.5).values == [[1.0, 0.0]]
    with pytest.raises(RuntimeError, match=r"1 of 2 .* \(explorer.max_failures is 0.4\)"):
        _evaluated("sums", [outcome], 0.4)


def test_tasks_in_a_file_that_is_called_by_a_number_have_a_name(
    tasks: Path, tmp_path: Path, tiny_dir: Path
) -> None:
    path = tasks.rename(tmp_path / "2024.jsonl")
    plan = _plan(str(tiny_dir), EvalOptions([str(tiny_dir)], tasks=[str(path)]), tmp_path)
    assert [one.name for one in used_tasksets(plan.config)] == ["tasks_2024"]


@pytest.mark.extension("remote")
def test_a_folder_is_never_measured_by_the_yamls_server(
    tasks: Path, tmp_path: Path, tiny_dir: Path
) -> None:
    columns = {"prompt_key": "question", "response_key": "answer"}
    inputs = {
        "default_workflow_type": "math_workflow",
        "eval_tasksets": [{"name": "sums", "path": str(tasks), "format": columns}],
    }
    tree = {
        "model": {"model_path": "/elsewhere", "max_prompt_tokens": 400, "max_response_tokens": 8},
        "buffer": {"explorer_input": inputs},
        "explorer": {
            "rollout_model": {"engine_type": "remote", "base_urls": ["http://127.0.0.1:1"]}
        },
    }
    path = tmp_path / "remote.yaml"
    path.write_text(yaml.safe_dump(tree))
    plan = _plan(str(tiny_dir), EvalOptions([str(tiny_dir)], path), tmp_path)
    assert plan.engine.urls == () and plan.model_path == str(tiny_dir.resolve())
    server = _plan(url := "http://127.0.0.1:2", EvalOptions([url], path, [
        f"model.model_path={tiny_dir}"]), tmp_path)  # fmt: skip
    assert server.engine.urls == (url,)
    keys = ["explorer.rollout_model.engine_type=remote"]
    with pytest.raises(ValueError, match="expected torch or vllm"):
        _plan(str(tiny_dir), EvalOptions([str(tiny_dir)], path, keys), tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "expected a YAML with eval_tasksets, or --tasks"),
        (("--tasks", "TASKS", "-k", "3", "-n", "2"), "-k 3: expected at most 2"),
        (("--tasks", "TASKS", "--reward", "none_such"), "unknown"),
        (("--tasks", "/no.jsonl"), "/no.jsonl"),
        (("--tasks", "TASKS", "--model", "http://127.0.0.1:1"), "whose tokenizer it shares"),
        (("--tasks", "TASKS", "--out", "/"), "--out / is a folder: expected a file"),
        (("--tasks", "TASKS", "--out", "/dev/null/x"), "/dev/null is no folder in which"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    words: tuple[str, ...], sentence: str, tasks: Path, tiny_dir: Path
) -> None:
    given = [str(tasks) if word == "TASKS" else word for word in words]
    done = call("--model", str(tiny_dir), *given)
    assert done.exit_code == 2
    assert sentence in re.sub(r"[│╭╮╰╯─\n]+ *", " ", done.output), done.output


def test_a_key_is_not_shown_to_several_hosts(
    tasks: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    apis = [f"m@http://127.0.0.{n}:9/v1" for n in (1, 2)]
    done = call(
        *("--tasks", f"sums={tasks}", "--workflow", "simple_workflow", "--reward", "math_reward"),
        *(word for api in apis for word in ("--model", api)),
        f"model.model_path={tiny_dir}",
    )
    assert done.exit_code == 2
    assert "127.0.0.1:9 and 127.0.0.2:9, and all of them would receive the same key" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt@https://x.y/v1", ("gpt", "https://x.y/v1")),
        ("http://user:pw@host:1", ("", "")),
        ("Qwen/Qwen3-0.6B", ("", "")),
    ],
)
def test_an_api_is_told_from_a_server(model: str, expected: tuple[str, str]) -> None:
    assert _api_of(model) == expected


@pytest.mark.parametrize(
    ("given", "name", "path"),
    [
        ("sums=data/a=b.jsonl", "sums", "data/a=b.jsonl"),
        ("verifiers:mine?level=2&split=eval", "verifiers:mine?level=2&split=eval", None),
        ("held_out=verifiers:mine?level=2", "held_out", "verifiers:mine?level=2"),
        ("data/a=b.jsonl", "a=b", None),
    ],
)
def test_options_of_a_path_are_no_name(given: str, name: str, path: str | None) -> None:
    options = EvalOptions(models=["m"], tasks=[given], prompt_key="q", response_key="a")
    [taskset] = _tree(options)["buffer"]["explorer_input"]["eval_tasksets"]
    assert (taskset["name"], taskset["path"]) == (name, path or given)
