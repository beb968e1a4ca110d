"""Chat templates of the shapes that models have, written for these tests."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.tiny import make_tokenizer

CHATML = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Thinking stays only in replies after the last user's turn; with enable_thinking=false the prompt
# ends in an empty block.
THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.index0 > ns.last and '</think>' in m.content %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + answer }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + answer }}{% endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{%- endif %}"
)
# Text is trimmed, nothing but a token stands between turns.
HEADERS = (
    "{{- '<|begin|>' }}"
    "{%- for m in messages %}"
    "{{- '<|head|>' + m.role + '<|tail|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\n\n' }}{%- endif %}"
)
# Roles must alternate; a system prompt is part of the first user's turn.
STRICT = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}"
    "{%- set turns = messages[1:] %}"
    "{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{%- for m in turns %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{% endif %}"
    "{%- if m.role == 'user' %}"
    "{{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content + '<|eot|>' }}{% endif %}"
    "{%- endfor %}"
)
GENERATION = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def headers_tokenizer() -> PreTrainedTokenizerFast:
    """With the special tokens of HEADERS and STRICT: `<|eot|>` ends a turn, `<|im_end|>` a text."""
    tokenizer = make_tokenizer()
    more: Any = ["<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *more]})
    return tokenizer
