"""What vLLM is told, and what it makes of that: read back in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.tiny import make_model
from tests.vllm import PYTHON, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]
ROOT = Path(__file__).parents[3]

# What the engine asks of vLLM is kept, and vLLM makes its configuration of it.
SIZES = """
import asyncio, json, sys
import vllm
from transformers import AutoTokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import async_llm
from trireme.ext.vllm.engine import VllmEngine

made = {}

class Kept:
    @classmethod
    def from_engine_args(cls, args, **given):
        made["context"] = given.get("usage_context", UsageContext.ENGINE_CONTEXT)
        made["seqs"] = args.create_engine_config(made["context"]).scheduler_config.max_num_seqs
        made["tables"] = [made["context"] in table for table in args.get_batch_defaults(1)]
        raise SystemExit

async_llm.AsyncLLM = Kept
path = sys.argv[1]
try:
    asyncio.run(VllmEngine.start(path, tokenizer=AutoTokenizer.from_pretrained(path),
                                 max_model_len=64, dtype="float32"))
except SystemExit:
    print(json.dumps(made))
"""

# Two replicas of a dense model, both of rank 0 as vLLM says, with two workers each.
RANKS = """
import json
from types import SimpleNamespace
from trireme.ext.vllm import transfer

ranks = []
transfer.WeightGroup = lambda meeting: (ranks.append(meeting.rank), SimpleNamespace(connect=int))[1]
meeting = {"host": "127.0.0.1", "port": 1, "world_size": 5, "rank": 1}
for index in range(2):
    for rank in range(2):
        parallel = SimpleNamespace(
            data_parallel_rank=0, data_parallel_index=index, world_size=2, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        one = transfer.GroupTransfer(None, config, None, None)
        one.init_transfer_engine(one.parse_init_info({"meeting": meeting, "leader": "trainer"}))
print(json.dumps(ranks))
"""

# A prompt of 50 tokens over 1,000 ids, 7 rows at a time: equal, and never all of it in float32.
SCORES = """
import json
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trireme.engines.sampling import log_probabilities
from trireme.ext.vllm import worker

class Largest(TorchDispatchMode):
    numbers = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.numbers = max(self.numbers, out.numel())
        return out

sampler = worker.ContractSampler(None)
sampler.score_temperature, worker.SCORED_AT_ONCE = 0.7, 7 * 1000
logits, ids = torch.randn(50, 1000).bfloat16(), torch.randint(0, 1000, (50,))
with Largest() as largest:
    found = sampler.gather_logprobs(sampler.compute_logprobs(logits), 0, ids)
whole = log_probabilities(logits.float() / 0.7).gather(-1, ids[:, None])
print(json.dumps([torch.equal(found.logprobs, whole), largest.numbers]))
"""


def said(script: str, *args: str) -> object:
    """The last line that a script prints in vLLM's environment."""
    done = subprocess.run(
        [PYTHON, "-c", script, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_its_batch_sizes_are_those_of_a_server(tmp_path: Path) -> None:
    made = said(SIZES, str(make_model(tmp_path / "model", head_dim=32)))
    assert made == {"context": "OPENAI_API_SERVER", "seqs": 128, "tables": [True, True]}


def test_workers_of_replicas_have_ranks_of_their_own() -> None:
    assert said(RANKS) == [1, 2, 3, 4]


def test_a_long_prompt_is_scored_some_rows_at_a_time() -> None:
    assert said(SCORES) == [True, 7000]
