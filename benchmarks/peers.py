"""Peers: one trainer or engine on one piece of work, in a process and an environment of its own.

    PYTHON benchmarks/peers.py PEER WORK.json

Started by `against_peers.py`. The last line that it prints is JSON: seconds of each optimizer step,
or tokens a second of each round, without the first, which warms up. This file imports a peer only
where it is asked for, since no environment has them all.

How each peer is set, so that it does its best on this work:

- TRL: whole batch at once, one generation and one optimizer step a batch, no reference model
  (beta 0), no gradient checkpointing (on by default), no dropout, no logging, no checkpoints.
- transformers: one batch, a key-value cache, no gradients, the scores as an output.
- vLLM: its Python interface, without a server between, compiled as it does by default; no
  detokenizing; log-probabilities of the sampled tokens; prefix caching off, as rounds are equal.
- Trireme: as a user gets it; the demo's YAML but for what the work says.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OBSERVATION = "and then you see what is left of it and go on"
LR, CLIP, CLIP_HIGH, BETAS = 3e-4, 0.2, 0.28, (0.9, 0.99)
BOUND = "VLLM_CPU_OMP_THREADS_BIND"


def worth(text: str, truth: str) -> float:
    """The reward: of a problem whether the last number is right, of other work a coin's toss."""
    if truth:
        numbers = re.findall(r"\d+", text)
        return float(bool(numbers) and numbers[-1] == truth)
    return float(sum(map(ord, text)) % 2)


def steps_between(ends: list[float]) -> list[float]:
    """Seconds from one step's end to the next one's; the first step warms up."""
    return [b - a for a, b in itertools.pairwise(ends)]


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation so far, as the chat template takes it."""
    talk = [{"role": "user", "content": row["question"]}]
    for reply in row.get("replies", []):
        talk += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": OBSERVATION},
        ]
    return talk


def by_trl(work: dict[str, Any]) -> dict[str, Any]:
    """GRPO by TRL's own loop."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    ends: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each optimizer step has ended."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.time())

    def reward(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        values = [worth(text, right) for text, right in zip(texts, truth, strict=True)]
        rewards.append(sum(values) / len(values))
        return values

    rows = [{"prompt": messages_of(row), "truth": row["answer"]} for row in work["rows"]]
    config = GRPOConfig(
        output_dir=str(Path(work["folder"]) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work["tasks"] * work["group"],
        num_generations=work["group"],
        gradient_accumulation_steps=1,
        num_iterations=1,
        max_steps=work["steps"],
        max_completion_length=work["max_tokens"],
        generation_kwargs={"min_new_tokens": work["min_tokens"]} if work["min_tokens"] else None,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        epsilon=CLIP,
        epsilon_high=CLIP_HIGH,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=work["seed"],
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": steps_between(ends), "reward": rewards}


def by_trireme(work: dict[str, Any]) -> dict[str, Any]:
    """The same by a run of Trireme; an episode is one sample, or one a step where that is asked."""
    from trireme import Experience, Model, Task, train
    from trireme.checkpoint.layout import JobFolder
    from trireme.monitor.monitor import FILE_NAME, read_metrics

    async def walk(task: Task, model: Model) -> list[Experience]:
        talk = messages_of({"question": task.prompt})
        said = ""
        for _ in range(work["episode"]):
            reply = await model.chat(talk)
            said += reply.text
            talk += [reply.message, {"role": "user", "content": OBSERVATION}]
        return model.experiences(reward=worth(said, ""), per_call=work["sample_a_step"])

    def reward(task: Task, answer: str) -> float:
        return worth(answer, str(task.truth or ""))

    folder = Path(work["folder"])
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in work["rows"]))
    run = train(
        model=work["model"],
        tasks=tasks,
        workflow=walk if work["episode"] else None,
        reward=None if work["episode"] else reward,
        checkpoint_root_dir=str(folder),
        seed=work["seed"],
        algorithm="grpo",
        **{
            "algorithm.repeat_times": work["group"],
            "algorithm.kl_loss_fn": "none",
            "algorithm.policy_loss_fn_args": {"clip_range_low": CLIP, "clip_range_high": CLIP_HIGH},
            "algorithm.optimizer": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0},
            "model.max_model_len": work["max_len"],
            "model.max_response_tokens": work["max_tokens"],
            "model.min_response_tokens": work["min_tokens"] or 1,
            "buffer.batch_size": work["tasks"],
            "buffer.total_steps": work["steps"],
            "buffer.train_batch_size": work["tasks"]
            * work["group"]
            * (work["episode"] if work["sample_a_step"] else 1),
            "buffer.explorer_input.taskset.format": {
                "prompt_key": "question",
                "response_key": "answer",
            },
            "explorer.runner_per_model": work.get("runners", 64),
            "trainer.grad_clip": 1.0,
            "trainer.max_token_len_per_gpu": 16384,
        },
    )
    plan = run.plans[-1]
    lines = read_metrics(JobFolder(plan.job_dir, plan.explorer_name).monitor / FILE_NAME)
    ends = [row["time"] for row in lines if row["part"] == "trainer"]
    return {"seconds": steps_between(ends), "reward": run.metrics["rollout/reward/mean"]}


def by_trireme_engine(work: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of the embedded engine."""
    import asyncio

    from transformers import AutoTokenizer

    from trireme.engines.device import Device
    from trireme.engines.engine import Sampling
    from trireme.engines.torch.engine import TorchEngine
    from trireme.engines.torch.shell import TorchSettings

    async def measure() -> list[float]:
        device = Device()
        engine = TorchEngine(
            work["model"],
            tokenizer=AutoTokenizer.from_pretrained(work["model"]),
            device=device,
            barrier=None,
            settings=TorchSettings(
                seed=0,
                max_model_len=work["max_len"],
                max_rows=len(work["prompts"]),
                dtype=work["dtype"],
            ),
        )

        async def once() -> None:
            await asyncio.gather(
                *(
                    engine.generate(ids, Sampling(max_tokens=n, ignore_eos=True), key=(0, i, 0))
                    for i, (ids, n) in enumerate(zip(work["prompts"], work["lengths"], strict=True))
                )
            )

        rates = [sum(work["lengths"]) / (await _timed(once)) for _ in range(work["rounds"] + 1)]
        await engine.close()
        device.close()
        return rates[1:]

    return {"tokens_per_s": asyncio.run(measure())}


async def _timed(once: Callable[[], Any]) -> float:
    started = time.perf_counter()
    await once()
    return time.perf_counter() - started


def by_transformers(work: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of `generate`, and of the matrix products of the same tokens alone."""
    import torch
    from generation import floor
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=getattr(torch, work["dtype"])
    )
    ids = torch.tensor(work["prompts"])
    longest, rates, floors = max(work["lengths"]), [], []
    for _ in range(work["rounds"] + 1):
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                output_scores=True,
                return_dict_in_generate=True,
            )
        rates.append(sum(work["lengths"]) / (time.perf_counter() - started))
        rows, width = ids.shape
        floors.append(rows * longest / floor(model, rows, width, longest))
    return {"tokens_per_s": rates[1:], "floor": floors[1:]}


def by_vllm(work: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of vLLM's CPU build."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault(BOUND, "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        work["model"],
        dtype=work["dtype"],
        skip_tokenizer_init=True,
        max_model_len=work["max_len"],
        max_num_seqs=len(work["prompts"]),
        enable_prefix_caching=False,  # rounds have the same prompts
        seed=0,
    )
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in work["lengths"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    rates = []
    for _ in range(work["rounds"] + 1):
        started = time.perf_counter()
        replies = engine.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - started
        rates.append(sum(len(reply.outputs[0].token_ids) for reply in replies) / took)
    return {"tokens_per_s": rates[1:]}


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "trl": by_trl,
    "trireme": by_trireme,
    "engine": by_trireme_engine,
    "transformers": by_transformers,
    "vllm": by_vllm,
}


def main() -> int:
    """Do the work that a file describes, and print what it took."""
    if len(sys.argv) != 3 or sys.argv[1] not in PEERS:
        print(f"usage: peers.py {{{','.join(PEERS)}}} WORK.json", file=sys.stderr)
        return 2
    work = json.loads(Path(sys.argv[2]).read_text())
    measured = PEERS[sys.argv[1]](work)
    used = resource.getrusage(resource.RUSAGE_SELF)
    measured["peak_mib"] = used.ru_maxrss / 1024
    print(json.dumps(measured), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
