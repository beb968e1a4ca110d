"""API: the model that `model.external_model` and its variables name, and what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trireme.config import Findings
from trireme.config.external import KEY
from trireme.config.schema import Config
from trireme.ext.external_model.asker import refuse_silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trireme.ext.external_model.engine import ApiEngine


@dataclass(frozen=True)
class Api:
    """A model behind someone else's OpenAI API; see ExternalModel."""

    name: str
    base_url: str
    key: str | None = None

    def examine(self, config: Config) -> Findings:
        """Check that the API is named, with all that it needs and nothing else."""
        findings = Findings()
        asked = config.model.external_model
        if not self.name:
            text = "is not set: expected the API's name for the model"
            findings.problem(f"{KEY}.model_name", text)
        if not self.base_url:
            text = "is not set: expected the API's address in it, such as https://api.openai.com/v1"
            findings.problem(f"{KEY}.base_url_env", f"names {asked.base_url_env}, which {text}")
        elif not (
            self.base_url.startswith(("http://", "https://")) and urlsplit(self.base_url).netloc
        ):
            text = f"which is {self.base_url!r}: expected http://HOST:PORT/v1 or https://HOST/v1"
            findings.problem(f"{KEY}.base_url_env", f"names {asked.base_url_env}, {text}")
        if not self.key:
            text = "is not set: expected the API's key in it, any text for a server that needs none"
            findings.problem(f"{KEY}.api_key_env", f"names {asked.api_key_env}, which {text}")
        if config.explorer.bench_on_latest_checkpoint:
            text = f"is true, and {KEY} has no checkpoints: expected false"
            findings.problem("explorer.bench_on_latest_checkpoint", text)
        if config.model.lora_configs:
            findings.problem(
                "model.lora_configs", f"is set, and {KEY} takes no adapter: leave it out"
            )
        findings.note(
            f"{KEY} ({self.name}): it receives conversations as messages, with temperature, "
            "top_p, stop and max_response_tokens; prompts are sent untruncated, and lengths are "
            "the token counts that it reports"
        )
        return findings

    def reach(self) -> None:
        """See ExternalModel."""
        refuse_silent(f"{KEY} ({self.name})", self.base_url)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See ExternalModel."""
        from trireme.ext.external_model.engine import byte_tokenizer

        return byte_tokenizer()

    def make(
        self, tokenizer: PreTrainedTokenizerBase, max_model_len: int, timeout: float
    ) -> ApiEngine:
        """See ExternalModel."""
        from trireme.ext.external_model.engine import ApiEngine

        return ApiEngine(
            self.base_url,
            self.name,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            api_key=self.key,
            timeout=timeout,
        )


def api_of(config: Config) -> Api:
    """The API that `model.external_model` and its variables name."""
    asked = config.model.external_model
    url, key = (_value(config, name) for name in (asked.base_url_env, asked.api_key_env))
    return Api(asked.model_name or config.model.model_path, url, key)


def _value(config: Config, name: str) -> str:
    """A variable of this process, or one that the run sets."""
    return config.explorer.env_vars.get(name) or os.environ.get(name, "")
