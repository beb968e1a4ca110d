"""Engines: specifies a plan's engine, and makes its auxiliary models: judges and teachers.

Each of `explorer.auxiliary_models` is a separate engine, embedded or behind servers, or an external
model behind an OpenAI API. They are never trained and get no new weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transformers import AutoTokenizer

from trireme.config import Plan
from trireme.config.engine_kind import REMOTE, kind_named
from trireme.config.external import ENDPOINT
from trireme.config.lookup import located, model_config
from trireme.config.schema_rollout import RolloutModelConfig
from trireme.data.picture_reader import reader_for
from trireme.engines.engine import Engine, Sampling
from trireme.engines.make import EngineSpec, make_torch_engine
from trireme.extensions import former_names
from trireme.launch.data import chat_template_of
from trireme.launch.servers import engine_servers
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.registry import EXTERNAL_MODELS

if TYPE_CHECKING:
    from trireme.engines.device import Device
    from trireme.explorer.runner import Key


class AuxiliaryModel(Protocol):
    """A model besides the trained one."""

    @property
    def model_path(self) -> str:
        """Return its folder, its id on the hub, or its name on a server."""
        ...

    def model(self, key: Key) -> Any:
        """Make the object through which a workflow uses it in one rollout."""
        ...


LONGEST = 8192
"""The most tokens of an auxiliary model without `max_model_len`, unless the run's limit is
larger."""


def engine_spec(plan: Plan, model_path: str) -> EngineSpec:
    """Specify the engine of the trained model, embedded or in its own process."""
    config = plan.config
    rollout = config.explorer.rollout_model
    return EngineSpec(
        model_path,
        plan.lengths.max_model_len,
        kind=plan.engine.kind,
        dtype=plan.dtype,
        device=plan.device,
        seed=plan.seed if rollout.seed is None else rollout.seed,
        options=kind_named(plan.engine.kind).options(plan),
        chat_template=chat_template_of(plan),
        enable_thinking=config.model.enable_thinking,
        trust_remote_code=config.model.trust_remote_code,
    )


@dataclass(frozen=True)
class Auxiliary:
    """A model that an engine of this run serves, or rollout servers do."""

    engine: Engine
    chat: ChatTokens
    model_path: str
    max_model_len: int
    sampling: Sampling

    def model(self, key: Key) -> Model:
        """Make the Model that a workflow uses for one rollout."""
        return Model(
            self.engine,
            self.chat,
            key=key,
            sampling=self.sampling,
            max_model_len=self.max_model_len,
            model_path=self.model_path,
        )


def make_auxiliary(plan: Plan, device: Device) -> list[AuxiliaryModel]:
    """Make all auxiliary models of the plan, in the YAML's order."""
    limit = plan.config.explorer.max_timeout
    made: list[AuxiliaryModel] = []
    for config in plan.config.explorer.auxiliary_models:
        if config.engine_type == "external":
            url, name = config.base_urls[0], config.model_path or ""
            endpoint = EXTERNAL_MODELS.get(ENDPOINT)
            made.append(endpoint(url, name, api_key=config.api_key, timeout=limit))
        else:
            made.append(_make(plan, config, device))
    return made


def examine_auxiliary(plan: Plan, *, teacher: bool = False) -> None:
    """Raise ValueError if an external model does not answer, bench's API included, or if the first
    one is to be the `teacher` and cannot be.
    """
    if plan.api is not None:
        plan.api.reach()
    for index, config in enumerate(plan.config.explorer.auxiliary_models):
        if config.engine_type == "external":
            who = f"explorer.auxiliary_models[{index}] ({config.model_path})"
            EXTERNAL_MODELS.get(ENDPOINT).reach(who, config.base_urls[0])
    if teacher and plan.mode in ("both", "explore"):
        theirs = plan.config.explorer.auxiliary_models[0].model_path or ""
        if all(located(path, "models") for path in (theirs, plan.model_path)):
            trust = plan.config.model.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(theirs, trust_remote_code=trust)
            ours = AutoTokenizer.from_pretrained(plan.model_path, trust_remote_code=trust)
            refuse_other_vocabulary(theirs, tokenizer, ours)


def refuse_other_vocabulary(teacher: str, theirs: Any, ours: Any) -> None:
    """Raise ValueError unless the teacher's tokenizer decodes the trained model's ids in the same
    way.

    `teacher` is the teacher's path.
    """
    if theirs.get_vocab() != ours.get_vocab():
        raise ValueError(
            f"explorer.auxiliary_models[0].model_path ({teacher}) has another "
            "vocabulary than model.model_path: a teacher scores the student's own token ids"
        )


def teacher_len(plan: Plan) -> int | None:
    """Return the most tokens that the teacher scores; None if only its own server knows."""
    config = plan.config.explorer.auxiliary_models[0]
    here = config.engine_type != REMOTE and located(config.model_path or "", "models")
    return auxiliary_len(plan, config) if here else config.max_model_len


def auxiliary_len(plan: Plan, config: RolloutModelConfig) -> int:
    """Return the limit of an auxiliary model's prompt and reply together, in tokens."""
    facts = model_config(config.model_path or "")
    facts |= facts.get("text_config") or {}
    positions = int(facts.get("max_position_embeddings") or 0)
    # a judge reads several replies: it may need more tokens than the model that wrote them
    return config.max_model_len or max(plan.lengths.max_model_len, min(positions, LONGEST))


def _make(plan: Plan, config: RolloutModelConfig, device: Device) -> Auxiliary:
    path = config.model_path or ""
    trust = plan.config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    longest = auxiliary_len(plan, config)
    engine: Engine
    if config.engine_type == REMOTE:
        engine = engine_servers().engine(plan, config.base_urls, config.api_key)
    else:
        seed = plan.seed if config.seed is None else config.seed
        spec = EngineSpec(
            path,
            longest,
            dtype=plan.dtype,
            device=plan.device,
            seed=seed,
            trust_remote_code=trust,
        )
        engine = make_torch_engine(spec, tokenizer, device)
    chat = ChatTokens(
        tokenizer,
        chat_template=config.chat_template,
        enable_thinking=config.enable_thinking,
        reasoning_parser=config.reasoning_parser,
        reader=reader_for(path),
    )
    reply = config.max_response_tokens or min(plan.lengths.max_response_tokens, longest - 1)
    return Auxiliary(engine, chat, path, longest, Sampling(max_tokens=reply))


__getattr__ = former_names(__name__)
