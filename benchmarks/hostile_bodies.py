"""Hostile bodies: how long a request keeps a server's health waiting, and how much memory it takes.

`python benchmarks/hostile_bodies.py` starts `trireme rollout` with a tiny model and a usual
tokenizer, sends one body of each kind to each API that it fits, and prints the answer, its seconds,
the longest that GET /health took meanwhile, and the most memory above that of the idle server, what
earlier bodies left included. `--rounds 3` sends each so often and keeps the largest. Behind that
stands the table of docs/security.md: a row for each kind, over its APIs.
Exits with 1 where health took a second or more, or a body took 500 MB or more.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

MOST_STALL_S, MOST_MB = 1.0, 500
LENGTH = 32768
"""Tokens of the model's context: the limits of a conversation grow with it."""
CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, SESSION = "/v1/responses", "/s/one/v1/chat/completions"
INFER, PROMPTS, CHATS = "/infer/", "/generate/", "/chat/"
STREAM, GENERATE, LOGPROBS = "/engine/stream", "/engine/generate", "/engine/logprobs"
CONVERSATIONS = (CHAT, SESSION, ANTHROPIC, RESPONSES, INFER, CHATS)


@dataclass(frozen=True)
class Body:
    """One kind, the APIs that it is sent to, and how it is made for each."""

    name: str
    paths: Sequence[str]
    make: Callable[[str], bytes]


def conversation(path: str, messages: bytes) -> bytes:
    """A request whose messages are these, written as JSON."""
    match path:
        case "/v1/responses":
            return b'{"max_output_tokens": 1, "input": ' + messages + b"}"
        case "/infer/":
            return (
                b'{"request_config": {"max_tokens": 1}, "infer_requests": [{"messages": '
                + messages
                + b"}]}"
            )
        case "/chat/":
            return b'{"max_tokens": 1, "messages": [' + messages + b"]}"
    return b'{"max_tokens": 1, "messages": ' + messages + b"}"


def said(text: bytes) -> bytes:
    """One message with this text."""
    return b'[{"role": "user", "content": "' + text + b'"}]'


def prompt(path: str, value: bytes) -> bytes:
    """A request whose prompt, text or ids, is this."""
    match path:
        case "/generate/":
            return b'{"max_tokens": 1, "prompts": [' + value + b"]}"
        case "/engine/generate":
            return b'{"ids": ' + value + b"}"
        case "/engine/stream":
            return b'{"id": "x", "requests": [{"ids": ' + value + b"}]}"
        case "/engine/logprobs":
            return b'{"ids": [' + value + b"]}"
    return b'{"max_tokens": 1, "prompt": ' + value + b"}"


def text_or_chat(path: str, text: bytes) -> bytes:
    """A request that holds this text."""
    if path in CONVERSATIONS:
        return conversation(path, said(text))
    return prompt(path, b'"' + text + b'"')


def beside(path: str, more: bytes) -> bytes:
    """A good request with more members."""
    start = text_or_chat(path, b"hi")
    return start[:-1] + b", " + more + b"}"


def many(item: bytes, count: int) -> bytes:
    """A list of it."""
    return b"[" + b",".join([item] * count) + b"]"


MESSAGE = b'{"role":"user","content":"a"}'
PARTS = b'[{"role": "user", "content": %s}]'
PART = b'{"type":"text","text":"a"}'
IMAGE = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * 99 + b'"}}'
TOOL = b'{"type":"function","function":{"name":"f"}}'
NAMES = b",".join(b'"key%d":1' % n for n in range(1_500_000))
IDS = (TEXT, GENERATE, STREAM, LOGPROBS, PROMPTS)
KINDS = (
    Body("1.5 million small messages (45 MB)", CONVERSATIONS,
         lambda path: conversation(path, many(MESSAGE, 1_500_000))),
    Body("20,000 small messages", CONVERSATIONS,
         lambda path: conversation(path, many(MESSAGE, 20_000))),
    Body("one word of 60 MB", (CHAT, SESSION, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS, CHATS),
         lambda path: text_or_chat(path, b"a" * 60_000_000)),
    Body("one word of 15 MB", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS, CHATS),
         lambda path: text_or_chat(path, b"a" * 15_000_000)),
    Body("one word of 4 MB, mixed letters", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"qwertyuiopasdfg" * 266_000)),
    Body("4000 small messages", CONVERSATIONS,
         lambda path: conversation(path, many(MESSAGE, 4000))),
    Body("one word of 1 MB", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"a" * 1_000_000)),
    Body("15 MB of text and one character of four bytes", (CHAT, TEXT, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"ab " * 5_000_000 + "\U0001f600".encode())),
    Body("30 MB of text and one character of four bytes", (CHAT, TEXT, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"ab " * 10_000_000 + "\U0001f600".encode())),
    Body("1 MB of text and one character of four bytes", (CHAT, TEXT, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"ab " * 330_000 + "\U0001f600".encode())),
    Body("1000 prompts of 1.5 kB", (TEXT, PROMPTS),
         lambda path: (b'{"max_tokens": 1, "prompt": ' if path == TEXT
                       else b'{"max_tokens": 1, "prompts": ')
         + many(b'"' + b"ab " * 500 + b'"', 1000) + b"}"),
    Body("1.5 million unknown keys (21 MB)", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS),
         lambda path: beside(path, NAMES)),
    Body("30 million ids (60 MB)", IDS, lambda path: prompt(path, many(b"5", 30_000_000))),
    Body("2 million ids", IDS, lambda path: prompt(path, many(b"300", 2_000_000))),
    Body("2 million words where ids belong", IDS,
         lambda path: prompt(path, many(b'"x"', 2_000_000))),
    Body("600,000 tools (25 MB)", (CHAT, ANTHROPIC, RESPONSES, CHATS),
         lambda path: beside(path, b'"tools": ' + many(TOOL, 600_000))),
    Body("500,000 parts of one message", (CHAT, ANTHROPIC, RESPONSES, INFER),
         lambda path: conversation(path, PARTS % many(PART, 500_000))),
    Body("200,000 images (32 MB)", (CHAT, ANTHROPIC, RESPONSES, INFER),
         lambda path: conversation(path, PARTS % many(IMAGE, 200_000))),
    Body("30 million brackets", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER, PROMPTS, STREAM),
         lambda path: beside(path, b'"metadata": ' + b"[" * 15_000_000 + b"]" * 15_000_000)),
    Body("an object in 90 others", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER),
         lambda path: beside(path, b'"metadata": ' + b'{"a":' * 90 + b"1" + b"}" * 90)),
    Body("keys of 10 MB each (30 MB)", (CHAT, TEXT, ANTHROPIC, RESPONSES, INFER),
         lambda path: beside(path, b",".join(b'"' + c * 10_000_000 + b'": 1'
                                             for c in (b"a", b"b", b"c")))),
    Body("1 million stop strings", (CHAT, TEXT, CHATS),
         lambda path: beside(path, b'"stop": ' + many(b'"ab"', 1_000_000))),
    Body("1 million entries of logit_bias", (CHAT, TEXT),
         lambda path: beside(path, b'"logit_bias": {'
                             + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}")),
    Body("a number of 30 MB", (CHAT, TEXT, INFER),
         lambda path: beside(path, b'"seed": ' + b"1" * 30_000_000)),
    Body("30 MB of escapes in text", (CHAT, TEXT, INFER, PROMPTS),
         lambda path: text_or_chat(path, b"\\u00e9" * 5_000_000)),
    Body("1 million prompts", (TEXT, PROMPTS),
         lambda path: (b'{"prompt": ' if path == TEXT else b'{"prompts": ')
         + many(b'"a"', 1_000_000) + b"}"),
    Body("16,000 generations of nothing", (STREAM,),
         lambda path: b'{"id": "x", "requests": ' + many(b"{}", 16_000) + b"}"),
    Body("60 MB of spaces", (CHAT, TEXT, INFER),
         lambda path: b" " * 60_000_000 + text_or_chat(path, b"hi")),
)  # fmt: skip


@dataclass
class Measured:
    """What one body did."""

    status: str
    seconds: float
    stall: float
    megabytes: float


def probe(port: int, stop: Event, longest: Any) -> None:
    """Ask for health again and again, in a process of its own; the longest answer's seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while not stop.is_set():
        start = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest.value = max(longest.value, time.monotonic() - start)
        time.sleep(0.02)


def status_of(port: int, path: str, body: bytes) -> str:
    """The answer's status; what was said where the connection ended without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before the body's end
            connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def memory(pid: int, name: str) -> int:
    """A line of a process's status, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def measure(port: int, pid: int, path: str, body: bytes, idle: int) -> Measured:
    """Send a body while health is looked at."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    context = multiprocessing.get_context("fork")
    stop, longest = context.Event(), context.Value("d", 0.0)
    looking = context.Process(target=probe, args=(port, stop, longest), daemon=True)
    looking.start()
    time.sleep(0.2)
    start = time.monotonic()
    status = status_of(port, path, body)
    seconds = time.monotonic() - start
    time.sleep(0.5)  # what goes on when the answer has been given
    stop.set()
    looking.join()
    peak = memory(pid, "VmHWM") - idle
    return Measured(status, seconds, longest.value, peak / 1e6)


def make_folder(folder: Path, length: int) -> Path:
    """A tiny model with a byte-level BPE, as real models have, of this repository's own pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own path is its folder
    from tests.tiny import CHATML

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train([str(page) for page in sorted(Path("docs").glob("*.md"))], trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextmanager
def server(folder: Path, length: int) -> Iterator[tuple[int, int]]:
    """`trireme rollout` on a port: the port and the process's id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trireme", "rollout", "--model", str(folder)]
    command += ["--port", str(port), "--max-model-len", str(length)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "serving" in process.stdout.readline()
            status_of(port, TEXT, b'{"prompt": "ab", "max_tokens": 2}')
            status_of(port, CHAT, conversation(CHAT, said(b"hi")))
            yield port, process.pid
        finally:
            process.terminate()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--length", type=int, default=LENGTH)
    options = parser.parse_args()
    bad = 0
    kinds: list[tuple[Body, list[Measured]]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place) / "model", options.length)
        with server(folder, options.length) as (port, pid):
            idle = memory(pid, "VmRSS")
            print(f"load {os.getloadavg()[0]:.1f}; the idle server has {idle / 1e6:.0f} MB\n")
            print("| body | to | answer | seconds | health waits | memory above idle |")
            print("|-|-|-|-|-|-|", flush=True)
            for kind in KINDS:
                if options.only not in kind.name:
                    continue
                rows: list[Measured] = []
                for path in kind.paths:
                    body = kind.make(path)
                    each = [measure(port, pid, path, body, idle) for _ in range(options.rounds)]
                    stall, most = max(m.stall for m in each), max(m.megabytes for m in each)
                    took = max(m.seconds for m in each)
                    rows += each
                    bad += stall >= MOST_STALL_S or most >= MOST_MB
                    print(
                        f"| {kind.name} | `{path}` | {each[-1].status} | {took:.1f} s "
                        f"| {stall:.2f} s | {max(most, 0):.0f} MB |",
                        flush=True,
                    )
                kinds.append((kind, rows))
    print("\n| body | APIs | answers | health waits | memory above idle |\n|-|-|-|-|-|")
    for kind, rows in kinds:
        answers = ", ".join(sorted({row.status for row in rows}))
        stall, most = max(row.stall for row in rows), max(row.megabytes for row in rows)
        print(f"| {kind.name} | {len(kind.paths)} | {answers} | {stall:.2f} s | {most:.0f} MB |")
    print(f"\nload {os.getloadavg()[0]:.1f}; {bad} rows beyond {MOST_STALL_S} s or {MOST_MB} MB")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
