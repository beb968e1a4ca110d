"""Jobs: the tiny runs that faults are tried on, and what each learns where nothing goes wrong."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.job import rows, small_config, write_jsonl
from tests.faults.program import LEARNED

STEPS = 4
JOB = "checkpoints/tests/job"
PLUGIN = '''
"""Workflows and judges of which every fifth call goes wrong."""
import asyncio, json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from trireme import reward, workflow


async def _answer(task, model, value):
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=value(reply.text))


def _length(text):
    return (sum(map(ord, text)) % 17) / 16


_calls = 0


def _odd(every=5):
    global _calls
    _calls += 1
    return _calls % every == 1


@workflow("raises")
async def raises(task, model):
    if _odd():
        raise RuntimeError("the environment is gone")
    return await _answer(task, model, _length)


@workflow("hangs")
async def hangs(task, model):
    if _odd():
        await asyncio.sleep(3600)
    return await _answer(task, model, _length)


@workflow("clings")
async def clings(task, model):
    while _odd():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    return await _answer(task, model, _length)


@workflow("rubbish")
async def rubbish(task, model):
    if _odd():
        return [None, 3]
    return await _answer(task, model, _length)


@workflow("infinite")
async def infinite(task, model):
    return await _answer(task, model, lambda text: float("nan") if _odd() else _length(text))


@reward("judge_hangs")
async def judge_hangs(task, answer):
    if _odd():
        await asyncio.sleep(3600)
    return {"accuracy": _length(answer)}


@reward("judge_rubbish")
async def judge_rubbish(task, answer):
    return "no number" if _odd() else {"accuracy": _length(answer)}


class Endpoint(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.answer({"data": []})

    def do_POST(self):
        question = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if _odd(30):  # the other rollouts of its task are judged with it
            time.sleep(3600)
        message = {"role": "assistant", "content": str(_length(question))}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self.answer({"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                     "choices": [choice]})

    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if PORT:
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
'''


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def config_of(kind: str, folder: Path, model: Path) -> dict[str, Any]:
    """The YAML of a job: a store and a style, or a workflow of the plug-in."""
    config = small_config(folder)
    config["model"]["model_path"] = str(model)
    config["explorer"] |= {"eval_on_startup": False, "eval_interval": 100}
    config["buffer"] |= {"total_steps": STEPS, "train_batch_size": 16}
    config["trainer"] = {"save_interval": 2}
    store, _, style = kind.partition(" ")
    buffer: dict[str, Any] = {"name": "shared"}
    if store in ("sql", "pair"):
        buffer["storage_type"] = "sql"
    if store == "replay":
        buffer["replay_buffer"] = {"enable": True}
    if store == "file":
        texts = [
            {"messages": [{"role": "user", "content": row["question"]},
                          {"role": "assistant", "content": row["answer"]}]}
            for row in rows(64)
        ]  # fmt: skip
        path = write_jsonl(folder / "data" / "sft.jsonl", texts)
        columns = {"prompt_type": "messages", "messages_key": "messages"}
        config["algorithm"] = {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}}
        buffer |= {"storage_type": "file", "path": str(path), "format": columns}
        config["mode"] = "train"
        config["trainer"]["total_steps"] = STEPS
        del config["buffer"]["explorer_input"]
    config["buffer"]["trainer_input"] = {"experience_buffer": buffer}
    if store == "engine":
        config["explorer"]["rollout_model"] = {"engine_type": "torch", "engine_num": 1}
        config["synchronizer"] = {"sync_method": "checkpoint"}
    if store == "user":
        port = free_port() if style == "endpoint_hangs" else 0
        (folder / "faulty.py").write_text(PLUGIN.replace("PORT", str(port)))
        config["plugins"] = [str(folder / "faulty.py")]
        config["explorer"] |= {"max_timeout": 5, "max_retry_times": 0, "max_failures": 1.0}
        own = "default_reward_fn_type" if style.startswith("judge") else "default_workflow_type"
        inputs = config["buffer"]["explorer_input"]
        if port:
            judge = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "m"}
            inputs["default_reward_fn_type"] = "judge"
            inputs["taskset"]["reward_fn_args"] = judge
            del inputs["eval_tasksets"]
        else:
            inputs[own] = style
    elif style:
        config["synchronizer"] = {"sync_style": style} | config.get("synchronizer", {})
    return config


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """As the command reads it."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def learned(folder: Path) -> Counter[str]:
    """Ids of what the run's train steps learned from; of a step made again the last time."""
    path = folder / LEARNED
    lines = path.read_text().splitlines() if path.exists() else []
    steps = {row["step"]: row["eids"] for row in map(json.loads, lines)}
    return Counter(eid for eids in steps.values() for eid in eids)


def final_weights(folder: Path) -> bytes | None:
    """The model at the end."""
    path = folder / JOB / f"global_step_{STEPS}" / "actor/huggingface/model.safetensors"
    return path.read_bytes() if path.exists() else None
