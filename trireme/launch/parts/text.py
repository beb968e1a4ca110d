"""Text: the tokenizer of a plan, and how conversations become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trireme.config import Plan
from trireme.model.chat_tokens import ChatTokens


@dataclass(frozen=True)
class Text:
    """The tokenizer, and how conversations become tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTokens
    template: str | None
    """The chat template that the YAML gives; None: the model's own."""


def make_text(plan: Plan, model_path: str) -> Text:
    """Tokenizer and chat template of the model, or the template that the YAML gives."""
    model = plan.config.model
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=model.trust_remote_code)
    template = model.custom_chat_template
    if template is None and model.chat_template_path:
        template = Path(model.chat_template_path).read_text()
    chat = ChatTokens(tokenizer, chat_template=template, enable_thinking=model.enable_thinking)
    return Text(tokenizer, chat, template)
