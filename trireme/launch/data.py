"""Data: makes a plan's tokenizer, chat template and buffers. All decisions are the Plan's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trireme.buffer.buffer import Buffer
from trireme.buffer.store import StoreParts
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.config.store import store_named
from trireme.data.picture_reader import reader_for
from trireme.files import read_text
from trireme.model.chat_tokens import ChatTokens

_TOKENIZER = "tokenizer.json"
_PROBE = "What is 3 + 4? Red, two, left."


@dataclass(frozen=True)
class Text:
    """The tokenizer, and the rules that turn conversations into tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTokens
    template: str | None
    """The chat template from the YAML; None: the model's own."""


def make_text(plan: Plan, model_path: str) -> Text:
    """Make the model's tokenizer, with its chat template or the YAML's; a stand-in for an API,
    which receives messages.
    """
    model = plan.config.model
    if plan.api is not None:
        return Text(tokenizer := plan.api.tokenizer(), ChatTokens(tokenizer), None)
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=model.trust_remote_code)
    _refuse_deaf(tokenizer, Path(model_path) / _TOKENIZER)
    template = chat_template_of(plan)
    chat = ChatTokens(
        tokenizer,
        chat_template=template,
        enable_thinking=model.enable_thinking,
        tool_call_parser=plan.config.explorer.rollout_model.tool_call_parser,
        reasoning_parser=plan.config.explorer.rollout_model.reasoning_parser,
        reader=reader_for(model_path),
    )
    return Text(tokenizer, chat, template)


def _refuse_deaf(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Raise ValueError for a tokenizer that loses most of a text, where its file does not: for some
    model types transformers makes another class of it than the folder names.
    """
    if type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():  # it is the file's own
        return
    whole = Tokenizer.from_file(str(file))
    read, stored = tokenizer.encode(_PROBE, add_special_tokens=False), whole.encode(_PROBE).ids
    if 2 * len(str(tokenizer.decode(read))) < len(whole.decode(stored)):
        raise ValueError(
            f"model.model_path: transformers makes a {type(tokenizer).__name__} of {file}, which "
            f"reads {_PROBE!r} as {tokenizer.decode(read)!r}: expected a file that this class reads"
        )


def chat_template_of(plan: Plan) -> str | None:
    """Return the YAML's chat template, given as text or as a file; None: the model's own."""
    model = plan.config.model
    if model.custom_chat_template is None and model.chat_template_path:
        return read_text(Path(model.chat_template_path))
    return model.custom_chat_template


def end_ids_of(model_path: str, text: Text) -> Collection[int]:
    """Return the ids that end the model's generation: supervised replies must end with one."""
    from trireme.engines.torch.shell import end_tokens_of  # takes 1 s, and `check` does not need it

    return end_tokens_of(model_path, text.tokenizer)


def make_buffer(
    plan: Plan,
    folder: JobFolder,
    text: Text,
    *,
    config: ExperienceBufferConfig | None = None,
    schema: str = "sft",
    end_ids: Collection[int] = (),
) -> Buffer:
    """Make the store between explorer and trainer, or open the data set that the trainer reads.

    With `config`: a data set that is mixed into the trainer's batches, repeated as needed. `schema`
    names the format of the rows, and `end_ids` are the ids that end the model's generation:
    supervised replies must end with one.
    """
    main = plan.config.buffer.trainer_input.experience_buffer
    parts = StoreParts(
        plan,
        config or main,
        folder.buffer,
        text.tokenizer,
        text.template,
        schema=schema,
        end_ids=end_ids,
        endless=config is not None,
        reader=text.chat.reader,
    )
    kind = plan.store.kind if config is None else "file"
    return store_named(kind, parts.config).make(parts)


def try_data(plan: Plan, schema: str) -> None:
    """Encode all rows that the trainer reads itself. Raises ValueError for one that is invalid."""
    if plan.store.kind == "file":
        text = make_text(plan, plan.model_path)
        make_buffer(plan, JobFolder(plan.job_dir), text, schema=schema)
