"""External model: a model of someone else's that `mode: bench` measures in place of `model_path`.

It has limits, weights and a tokenizer of its own, and what it answers cannot be trained. What asks
it enters by a name of EXTERNAL_MODELS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trireme.config import Findings
from trireme.extensions import missing
from trireme.registry import EXTERNAL_MODELS

if TYPE_CHECKING:
    from trireme.config.schema import Config
    from trireme.config.stages import StageFacts
    from trireme.engines.engine import Engine

KEY = "model.external_model"
NAME = "openai"
"""The name in EXTERNAL_MODELS of the one that `model.external_model` describes."""
ENDPOINT = "endpoint"
"""The name in EXTERNAL_MODELS of the class of an auxiliary model of `engine_type: external`. Its
arguments are the address, the model's name, `api_key` and `timeout`; `reach(who, url)` raises
ValueError where nothing answers."""


class ExternalModel(Protocol):
    """A model behind an API."""

    @property
    def name(self) -> str:
        """What requests call it."""
        ...

    @property
    def base_url(self) -> str:
        """The API's address."""
        ...

    def examine(self, config: Config) -> Findings:
        """What is missing or wrong, and what the measurement does without."""
        ...

    def reach(self) -> None:
        """Raise ValueError where nothing answers at its address."""
        ...

    def tokenizer(self) -> Any:
        """A tokenizer that records what is sent and answered, without files of a model."""
        ...

    def make(self, tokenizer: Any, max_model_len: int, timeout: float) -> Engine:
        """The engine that asks it; `timeout` is of one request, in seconds."""
        ...


def external_of(config: Config) -> ExternalModel | None:
    """The model that `model.external_model` describes; None where it is off, or where nothing
    here can ask it.
    """
    if not config.model.external_model.enable or NAME not in EXTERNAL_MODELS:
        return None
    return EXTERNAL_MODELS.get(NAME)(config)


def check_external(stage: StageFacts) -> Findings:
    """Check the model of someone else's that is to be measured, and nothing else."""
    findings = Findings()
    config = stage.config
    if not config.model.external_model.enable:
        return findings
    if not stage.asks_api:
        text = f"is true in mode {config.mode}: bench alone measures a model behind an API, whose "
        findings.problem(f"{KEY}.enable", f"{text}replies cannot be trained")
        return findings
    if (model := external_of(config)) is None:
        findings.problem(f"{KEY}.enable", f"is true, which {missing('external_model', NAME)}")
        return findings
    findings.add(model.examine(config))
    return findings
