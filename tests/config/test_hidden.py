"""What a run keeps of its start holds no key, token or password, and all else as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.job import small_config
from trireme.config import Plan, load_config
from trireme.config.hidden import HIDDEN, hidden_words, is_secret, resolved, without_secrets
from trireme.config.schema import Config
from trireme.launch.check import make_plans

S = "S3cr3tValue"
WORDS: list[list[str]] = [
    ["--api-key", S],
    [f"--api-key={S}"],
    [f"--vllm_api_key={S}"],
    [f"explorer.rollout_model.api_key={S}"],
    [f"explorer.rollout_model={{api_key: {S}}}"],
    [f"explorer.rollout_model={{api_key: '{S}', engine_num: 1}}"],
    [f"explorer.auxiliary_models=[{{model_path: a, api_key: {S}}}]"],
    [f"--explorer.rollout_model={{api_key: {S}}}"],
    ["--model_kwargs", json.dumps({"api_key": S})],
    [f"explorer.env_vars={{OPENAI_KEY: {S}, HOME: /root}}"],
    [f"explorer.env_vars.OPENAI_API_KEY={S}"],
    [f"explorer.env_vars.DB_PASS={S}"],
    [f"explorer.env_vars.HF_TOKEN={S}"],
    [f"explorer.env_vars.awsSecretAccessKey={S}"],
    [f"workflow_args.secrets={{a: {S}}}"],
    [f"workflow_args.secrets.a={S}"],
    [f"workflow_args.secrets=[{S}]"],
    [f"workflow_args.headers={{Authorization: Bearer {S}, Cookie: sid={S}}}"],
    [f"workflow_args.header=Authorization: Bearer {S}"],
    [f"workflow_args.header='Cookie: sid={S}; other={S}'"],
    ["--header", f"X-Api-Key: {S}"],
    [f"workflow_args.command=curl -H 'Authorization: Basic {S}' host"],
    [f"workflow_args.command=[curl, --token, {S}]"],
    [f"workflow_args.command=agent --api-key {S} --n 3"],
    [f"workflow_args.command=OPENAI_KEY={S} agent"],
    [f"--path=postgresql://user:{S}@host/db"],
    [f"path=postgresql://host/db?user=me&password={S}"],
    [f"path=host=h dbname=d user=me password={S}"],
    [f"path=host=h password='{S} {S}' dbname=d"],
    [f"path=host=h sslpassword={S}"],
    [f"url=https://{S}@github.com/a/b"],
    [f"url=https://h/v1?api_key={S}&n=3"],
    [f"url=https://h/v1?n=3&access_token={S}"],
    ["note=AKIAIOSFODNN7EXAMPLE"],
    ["note=sk-abcdefghijklmnop"],
    ["note=ghp_abcdefghijklmnopqrstuvwxyz012345"],
    ["note=AIzaSyA1234567890abcdefghijklmnopqrs"],
    ["note=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123"],
    [f"auth={{user: me, value: {S}}}"],
    [f"credentials={S}"],
    [f"monitor.monitor_args={{wandb: {{api_key: {S}}}}}"],
    [f"clientSecret={S}"],
    [f"passwd={S}", f"passphrase={S}", f"pwd={S}"],
]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
LOOKS = ("AKIAIOSF", "abcdefghijkl", "AIzaSy", "eyJhbG")


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words)[:60])
def test_a_command_line_shows_no_secret(words: list[str]) -> None:
    shown = " ".join(hidden_words(["trireme", "run", *words]))
    assert HIDDEN in shown and S not in shown and not any(look in shown for look in LOOKS), shown
    # nor does a configuration that holds the same
    held: dict[str, Any] = {"command": words}
    for word in words:
        key, _, value = word.partition("=")
        held[key] = yaml.safe_load(value) if value[:1] in "[{" and value else value
    text = json.dumps(without_secrets(held if len(words) == 1 else {"command": words}))
    assert S not in text and not any(look in text for look in LOOKS), text


SHOWN = [
    ["--api-key-file", "/run/key", "--port", "80"],
    ["model.max_response_tokens=8", "x.prompt_key=q"],
    ["explorer.rollout_model={engine_num: 2, max_tokens: 8}"],
    ["buffer.explorer_input.taskset.format={prompt_key: question, response_key: answer}"],
    ["algorithm.policy_loss_fn_args={bypass: true, num_tokens: 3}"],
    ["workflow_args={truth_key: answer, author: me, tokenizer: a, keywords: b}"],
    ["http://127.0.0.1:8000/v1", "note=the key to it is: read"],
    ["model.model_path=Qwen/Qwen2.5-0.5B", "a=b=c", "note=monkey"],
]


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: " ".join(words)[:60])
def test_what_only_sounds_secret_is_shown(words: list[str]) -> None:
    assert hidden_words(words) == words


def test_every_key_of_the_schema_but_the_secret_one_is_shown() -> None:
    values = Config.model_construct().model_dump()

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return "shown" if value is None or isinstance(value, str) else value

    def leaves(value: Any, key: str = "") -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {key: value}
        return {k: v for n, inner in value.items() for k, v in leaves(inner, f"{key}.{n}").items()}

    before = leaves(filled(values))
    after = leaves(without_secrets(filled(values)))
    assert len(before) > 100
    hidden = {key for key in before if before[key] != after.get(key)}
    assert {key.rpartition(".")[2] for key in hidden} == {"api_key"}
    for name in ("max_tokens", "prompt_key", "stop_token_ids", "feature_keys", "api_key_env"):
        assert not is_secret(name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name + "/" + path.name)
def test_the_examples_are_shown_as_they_are(path: Path) -> None:
    held = yaml.safe_load(path.read_text())
    assert without_secrets(held) == held


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", "abc", "--port", "80"], ["--api-key", "***", "--port", "80"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["explorer.rollout_model.api_key=abc"], ["explorer.rollout_model.api_key=***"]),
        (["explorer.env_vars.OPENAI_API_KEY=abc"], ["explorer.env_vars.OPENAI_API_KEY=***"]),
        (["--url", "postgresql://u:pw@h/d"], ["--url", "postgresql://u:***@h/d"]),
        (["a.path=postgresql://u:pw@h/d"], ["a.path=postgresql://u:***@h/d"]),
        (["note=sk-abcdefghijklmnop"], ["note=***"]),
        (["model.max_response_tokens=8", "x.prompt_key=q"],) * 2,
    ],
)
def test_a_command_line_is_kept_without_its_secrets(words: list[str], expected: list[str]) -> None:
    assert hidden_words(words) == expected


def test_secrets_of_a_configuration_are_stars_whatever_holds_them() -> None:
    given = {
        "api_key": "a",
        "env_vars": {"HF_TOKEN": "b", "HOME": "c"},
        "list": [{"password": "d"}],
    }
    assert without_secrets(given) == {
        "api_key": "***",
        "env_vars": {"HF_TOKEN": "***", "HOME": "c"},
        "list": [{"password": "***"}],
    }


def test_a_resolved_stage_is_read_again_and_means_the_same_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path) | {
        "stages": [{"stage_name": "one"}, {"stage_name": "two", "buffer": {"batch_size": 2}}]
    }

    def plan_of(values: dict[str, Any]) -> list[Plan]:
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(values))
        return make_plans(load_config(path))

    second = plan_of(config)[1]
    (again,) = plan_of(resolved(second, second.model_path))
    assert again.job_dir == second.job_dir
    assert again.steps.batch_size == 2
    assert again.steps.train == second.steps.train
