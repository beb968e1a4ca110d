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
# Tools stand in the system's turn, tool results that follow each other share one user's turn.
TOOL_TURNS = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{%- else %}{% set system = 'You help.' %}{% endif %}"
    "{{- '<|im_start|>system\n' + system }}"
    "{%- if tools %}{{- '\n\n# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}"
    "{{- '\n</tools>' }}{% endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- elif not (m.role == 'system' and loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# The same with thinking, which stays behind the last question only: a user's turn that is no tool
# result. The last reply has a thinking block even where it is empty.
TOOL_THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\n# Tools' }}"
    "{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set content, thought = m.content, '' %}"
    "{%- if '</think>' in m.content %}"
    "{%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{% endif %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As HEADERS; a tool's result is JSON, of a role of its own, and tools stand in the first question.
HEADER_TOOLS = (
    "{{- '<|begin|><|head|>system<|tail|>\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% endif %}"
    "{{- '<|eot|>' }}"
    "{%- set ns = namespace(told=not tools) %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|head|>ipython<|tail|>\n\n' + (m.content | tojson) + '<|eot|>' }}"
    "{%- elif m.role == 'user' and not ns.told %}{% set ns.told = true %}"
    "{{- '<|head|>user<|tail|>\n\nFunctions:\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\n\n' }}{% endfor %}"
    "{{- m.content | trim + '<|eot|>' }}"
    "{%- elif m.role != 'system' %}"
    "{{- '<|head|>' + m.role + '<|tail|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\n\n' }}{%- endif %}"
)


def headers_tokenizer() -> PreTrainedTokenizerFast:
    """With the special tokens of HEADERS and STRICT: `<|eot|>` ends a turn, `<|im_end|>` a text."""
    tokenizer = make_tokenizer()
    more: Any = ["<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *more]})
    return tokenizer
