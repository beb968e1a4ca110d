"""Api: the model behind someone else's OpenAI API that `mode: bench` measures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from trireme.config.schema import Config
from trireme.config.stages import StageConfig

_KEY = "model.external_model"


@dataclass(frozen=True)
class Api:
    """Where it is, and what it is called there."""

    name: str
    base_url: str
    key: str | None = None


def api_of(config: Config) -> Api | None:
    """What `model.external_model` and its variables name; None where it is not enabled."""
    asked = config.model.external_model
    if not asked.enable:
        return None
    url, key = (_value(config, name) for name in (asked.base_url_env, asked.api_key_env))
    return Api(asked.model_name or config.model.model_path, url, key)


def check_api(stage: StageConfig) -> None:
    """Whether the API that a stage measures is named, with all that it needs and nothing else."""
    config, asked = stage.config, stage.config.model.external_model
    if (api := api_of(config)) is None:
        return
    if not stage.asks_api:
        text = f"is true in mode {config.mode}: bench alone measures a model behind an API, whose "
        stage.problem(f"{_KEY}.enable", f"{text}replies cannot be trained")
        return
    if not api.name:
        text = "is not given: expected the name that the API knows the model by"
        stage.problem(f"{_KEY}.model_name", text)
    if not api.base_url:
        text = "is not set: expected the API's address in it, such as https://api.openai.com/v1"
        stage.problem(f"{_KEY}.base_url_env", f"names {asked.base_url_env}, which {text}")
    elif not (api.base_url.startswith(("http://", "https://")) and urlsplit(api.base_url).netloc):
        text = f"which is {api.base_url!r}: expected http://HOST:PORT/v1 or https://HOST/v1"
        stage.problem(f"{_KEY}.base_url_env", f"names {asked.base_url_env}, {text}")
    if not api.key:
        text = "is not set: expected the API's key in it, any word for a server that asks for none"
        stage.problem(f"{_KEY}.api_key_env", f"names {asked.api_key_env}, which {text}")
    if config.explorer.bench_on_latest_checkpoint:
        text = f"is true, and {_KEY} has no checkpoints: expected false"
        stage.problem("explorer.bench_on_latest_checkpoint", text)
    if config.model.lora_configs:
        stage.problem("model.lora_configs", f"is given, and {_KEY} takes no adapter: leave it out")
    stage.notes.append(
        f"{_KEY} ({api.name}): it gets conversations as messages, with temperature, top_p, stop "
        "and max_response_tokens; prompts are sent whole, and lengths are the tokens that its "
        "answers say they have"
    )


def _value(config: Config, name: str) -> str:
    """A variable of this process, or one that the run sets."""
    return config.explorer.env_vars.get(name) or os.environ.get(name, "")
