"""What vLLM is told, and what it makes of that: read back in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

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

# The same rows with the one log-softmax that serves both numbers, and by the way of cuts.
ONE = """
import json
from types import SimpleNamespace
import numpy, torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from trireme.ext.vllm import worker
from trireme.ext.vllm.options import STREAM

def sampled(heats, dtype, **cut):
    count, made = len(heats), []
    names = [f"{n}" for n in range(count)]
    given = [SamplingParams(temperature=heat, extra_args={STREAM: 7 + n}, **cut)
             for n, heat in enumerate(heats)]
    batch = SimpleNamespace(req_ids=names, num_reqs=count, num_tokens_no_spec=numpy.full(count, 9),
                            num_prompt_tokens=numpy.full(count, 4))
    requests = {n: SimpleNamespace(sampling_params=p) for n, p in zip(names, given)}
    sampler = worker.ContractSampler(SimpleNamespace(input_batch=batch, requests=requests))
    own, calls = worker.log_probabilities, []
    worker.log_probabilities = lambda logits: (calls.append(1), own(logits))[1]
    heat = torch.tensor(heats)
    cold = heat < worker.GREEDY_BELOW
    none = torch.zeros(count)
    metadata = SamplingMetadata(
        temperature=None if bool(cold.all()) else heat, all_greedy=bool(cold.all()),
        all_random=not bool(cold.any()), top_p=None, top_k=None, generators={},
        max_num_logprobs=3, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
        presence_penalties=none, repetition_penalties=none, output_token_ids=[[]] * count,
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors())
    torch.manual_seed(0)
    logits = (4 * torch.randn(count, 500)).to(dtype)
    out = sampler(logits, metadata)
    worker.log_probabilities = own
    tensors = out.logprobs_tensors
    return len(calls), [out.sampled_token_ids, tensors.logprob_token_ids, tensors.logprobs]

counts, equal = [], []
for dtype in (torch.float32, torch.bfloat16):
    for heats in ([1.0] * 8, [0.7, 1.3, 1.0], [0.7, 0.0, 1.0], [0.0, 0.0]):
        one, plain = sampled(heats, dtype)
        # a minimum that is reached cuts nothing
        two, cut = sampled(heats, dtype, min_tokens=1)
        counts.append([one, two])
        equal.append(all(torch.equal(a, b) for a, b in zip(plain, cut)))
print(json.dumps([counts, equal]))
"""

# A batch as vLLM's asynchronous scheduling leaves it: numbers of tokens go up by a placeholder
# before a token is known; a request is interrupted, the last row takes its place, it comes back.
SCHEDULED = """
import json
from types import SimpleNamespace
import numpy, torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from trireme.ext.vllm import worker
from trireme.ext.vllm.options import STREAM

def logits_of(name, position):
    return 3 * torch.randn(200, generator=torch.Generator().manual_seed(100 * int(name) + position))

def run(steps):
    params = {name: SamplingParams(extra_args={STREAM: 7 + int(name)}) for name in "0123"}
    requests = {name: SimpleNamespace(sampling_params=params[name]) for name in params}
    batch = SimpleNamespace(req_ids=[], num_reqs=0)
    sampler = worker.ContractSampler(SimpleNamespace(input_batch=batch, requests=requests))
    drawn, done = {name: [] for name in requests}, dict.fromkeys(requests, 0)
    for names in steps:
        batch.req_ids[:], batch.num_reqs = names, len(names)  # the same list, as vLLM's
        batch.num_prompt_tokens = numpy.full(8, 5)  # rows behind the last are left over
        batch.num_tokens_no_spec = numpy.zeros(8, dtype=int)
        batch.num_tokens_no_spec[:len(names)] = [5 + done[n] for n in names]
        none, heat = torch.zeros(len(names)), torch.ones(len(names))
        metadata = SamplingMetadata(
            temperature=heat, all_greedy=False, all_random=True, top_p=None, top_k=None,
            generators={}, max_num_logprobs=1, no_penalties=True, prompt_token_ids=None,
            frequency_penalties=none, presence_penalties=none, repetition_penalties=none,
            output_token_ids=[[-1] * done[n] for n in names], allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=LogitsProcessors())
        out = sampler(torch.stack([logits_of(n, done[n]) for n in names]), metadata)
        for name, token in zip(names, out.sampled_token_ids[:, 0].tolist()):
            drawn[name].append(token)
            done[name] += 1  # before anyone has read the token
    return drawn

together = run(["0123", "0123", "032", "032", "0321", "1302", "1", "1"])
alone = {}
for name, tokens in together.items():
    alone[name] = run([name] * len(tokens))[name]
print(json.dumps([together, alone]))
"""

# 40 tokens, read along and not: how often vLLM hands some over.
WAKES = """
import asyncio, json, sys
from transformers import AutoTokenizer
from trireme.engines.engine import Sampling
from trireme.ext.vllm.engine import VllmEngine

async def main(path):
    engine = await VllmEngine.start(path, tokenizer=AutoTokenizer.from_pretrained(path),
                                    max_model_len=64, dtype="float32")
    take, wakes, found = engine._take, [], []
    engine._take = lambda *given: (wakes.append(1), take(*given))[1]
    for on_token in (None, lambda *_: None):
        wakes.clear()
        asked = Sampling(max_tokens=40, ignore_eos=True, seed=3)
        [reply] = await engine.generate([5, 6, 7], asked, key=(1,), on_token=on_token)
        found.append([len(wakes), reply.ids, reply.logprobs])
    await engine.close()
    return found

if __name__ == "__main__":
    print("\\n" + json.dumps(asyncio.run(main(sys.argv[1]))))
"""

# The levels of sleep that the engine asks the real vLLM for, which ignores them on a CPU.
LEVELS = """
import asyncio, json, sys
from transformers import AutoTokenizer
from trireme.engines.engine import Sampling
from trireme.ext.vllm.engine import VllmEngine

async def main(path, level):
    engine = await VllmEngine.start(path, tokenizer=AutoTokenizer.from_pretrained(path),
                                    max_model_len=64, dtype="float32",
                                    options={"enable_sleep_mode": True, "sleep_level": level})
    sleep, levels = engine._llm.sleep, []

    async def noted(level, mode):
        levels.append(level)
        await sleep(level=level, mode=mode)

    engine._llm.sleep = noted
    await engine.pause()  # the trainer scores, and pushes nothing
    await engine.resume()
    await engine.pause(weights_follow=True)
    await engine.pause()  # it is asleep already
    lacking = ""
    try:
        await engine.resume()
    except RuntimeError as error:
        lacking = str(error)
    await engine.update_weights(path, 1)
    await engine.resume()
    [reply] = await engine.generate([5, 6, 7], Sampling(max_tokens=4, ignore_eos=True), key=(1,))
    await engine.close()
    return levels, lacking, list(reply.versions)

if __name__ == "__main__":
    print("\\n" + json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
"""


def said(script: str, *args: str) -> Any:
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


def test_rows_without_cuts_need_one_log_softmax_and_sample_the_same() -> None:
    counts, equal = said(ONE)
    assert counts == [[1, 2]] * 8 and equal == [True] * 8


def test_tokens_come_some_at_a_time_where_nobody_reads_along(tmp_path: Path) -> None:
    (few, *reply), (many, *same) = said(WAKES, str(make_model(tmp_path / "model", head_dim=32)))
    # four parts of 40: the first token at once, then 16, 16 and the rest. Parts that wait together
    # are taken together on a busy machine
    assert few <= 4 < many <= 40 and reply == same


def test_a_request_draws_the_same_tokens_however_it_is_scheduled() -> None:
    together, alone = said(SCHEDULED)
    assert together == alone and len(set(map(tuple, alone.values()))) == 4
    assert [len(tokens) for tokens in together.values()] == [6, 6, 6, 6]


@pytest.mark.parametrize("level", [2, 1])
def test_it_gives_up_its_weights_only_where_new_ones_follow(tmp_path: Path, level: int) -> None:
    model = str(make_model(tmp_path / "model", head_dim=32))
    levels, lacking, versions = said(LEVELS, model, str(level))
    assert levels == [1, level] and set(versions) == {1}
    assert ("expected a push first" in lacking) == (level == 2)
