"""`trireme chat`: a conversation with a trained model, in the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from trireme.checkpoint.layout import STEP_NAME, JobFolder
from trireme.cli.run import complain
from trireme.config.gpus import num_gpus
from trireme.config.lookup import model_facts
from trireme.text import say

LONGEST = 4096
"""Tokens of a conversation, if the model allows as many."""


def chat(folder: Path, *, system: str | None, temperature: float, max_tokens: int) -> int:
    """Reply to the lines of standard input until it ends; returns the exit code."""
    try:
        model = model_in(folder)
    except ValueError as error:
        complain(str(error))
        return 2
    say(f"loading {model}", flush=True)
    try:
        with asyncio.Runner() as runner:
            _talk(runner, model, system, temperature, max_tokens)
    except KeyboardInterrupt:
        say()
    return 0


def model_in(root: Path) -> Path:
    """A model's folder, that of a checkpoint, or of the newest one in a run's.

    Raises ValueError if there is none, or if it has no exported weights.
    """
    folder = _folder_in(root)
    try:
        model_facts(str(folder))
    except ValueError as error:
        raise ValueError(f"{folder} {error}") from error
    return folder


def _folder_in(root: Path) -> Path:
    if (root / "config.json").is_file():
        return root
    jobs = [root, *sorted(path for path in root.glob("*") if path.is_dir())]
    folders = [JobFolder(job).hf_dir(step) for job in jobs for step in JobFolder(job).steps()]
    if step := STEP_NAME.match(root.resolve().name):
        folders = [JobFolder(root.resolve().parent).hf_dir(int(step[1]))]
    folders = [folder for folder in folders if (folder / "config.json").is_file()]
    if not folders:
        raise ValueError(
            f"{root} contains no model: expected the folder of a model, a checkpoint "
            "(global_step_N) or a run"
        )
    return max(folders, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _talk(
    runner: asyncio.Runner, folder: Path, system: str | None, temperature: float, max_tokens: int
) -> None:
    """Chat with the lines of standard input, read in the main thread, where Ctrl-C takes effect at
    once.
    """
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from trireme.engines.device import Device
    from trireme.engines.engine import Sampling
    from trireme.engines.make import EngineSpec, make_torch_engine
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Model

    disable_progress_bar()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= config.get("text_config") or {}
    length = min(config.get("max_position_embeddings") or LONGEST, LONGEST)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    device = Device()
    where, dtype = ("cuda", "bfloat16") if num_gpus() else ("cpu", "float32")  # as in a run
    spec = EngineSpec(str(folder), length, dtype=dtype, device=where)
    engine = make_torch_engine(spec, tokenizer, device)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    model = Model(
        engine, ChatTokens(tokenizer), key=(0, 0, 0), sampling=sampling, max_model_len=length,
        max_prompt_tokens=length - 1,
    )  # fmt: skip
    say("an empty line or Ctrl-D ends", flush=True)
    messages = [{"role": "system", "content": system}] if system else []
    try:
        while text := _line():
            messages.append({"role": "user", "content": text})
            reply = runner.run(model.chat(messages))
            messages.append(reply.message)
            say(reply.text, flush=True)
    finally:
        runner.run(engine.close())
        device.close()


def _line() -> str:
    if sys.stdin.isatty():
        say("> ", end="", flush=True)
    return sys.stdin.readline().strip()
