"""Measures what only a GPU can show: `make gpu-report`, about ten minutes.

It prints one table, the most important lines first, each with its pass mark, and writes the same as
JSON after every line. It needs no network, vLLM or Ray, and runs with any interpreter that has
torch, transformers and the packages of `NEEDED`; missing ones are named first, with the command
that installs them. A line that cannot run says why, and the others continue: on a GPU each line has
its own process, so that an error of CUDA, a crash or a hang ends only that line, and is reported
with its place in the code. `--half 1` and `--half 2` split the report into two calls of at most
nine minutes each. `--device cpu` does the same with small sizes, and judges only marks that do not
depend on speed. docs/gpus.md lists the marks and what each one decides.

The exit code is 1 if a mark was missed or a line failed, else 2 if a line was not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# set before torch is loaded, as in the trainer processes of a run
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

try:
    import torch
except ImportError:
    sys.exit(f"gpu_report needs torch, and {sys.executable} has none")
from torch import Tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

GIB = 2**30
BACKENDS = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


@dataclass(frozen=True)
class Sizes:
    """How much work a line does."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tokens: tuple[int, ...]
    """Of a train step, flat."""
    head_entries: int
    gap_tokens: int
    rows: tuple[int, ...]
    """That decode at once."""
    new_tokens: int
    copy_bytes: int
    product: int
    """Width of the square product that is timed."""


GPU = Sizes(
    1536, 8960, 28, 12, 2, 151936, (4096, 8192, 16384, 32768), 16384, 4096, (1, 64, 256), 512,
    2**30, 8192,
)  # fmt: skip
CPU = Sizes(
    64, 128, 2, 4, 2, 2048, (256, 512), 256, 256, (1, 4), 16, 2**24, 512
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure of the table."""

    line: str
    what: str
    value: str
    mark: str = ""
    """What it takes to pass; empty: it is told, not judged."""
    passed: bool | None = None
    figures: dict[str, float] | None = None
    skipped: bool = False
    """Whether it says why its line was not measured."""

    def __str__(self) -> str:
        verdict = {None: "", True: "pass", False: "FAIL"}[self.passed]
        if self.skipped:
            verdict = "not measured"
        return f"| {self.line} | {self.what} | {self.value} | {self.mark} | {verdict} |"


Lines = Iterator[Row]


@dataclass
class Machine:
    """Where lines are measured."""

    device: torch.device
    sizes: Sizes
    folder: Path

    @property
    def gpu(self) -> bool:
        """Whether it has one; marks of speed are judged on a GPU alone."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """For all that was asked of it."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any], times: int = 3) -> float:
        """The fastest of some tries, after one that does not count."""
        work()
        self.wait()
        tries = []
        for _ in range(times):
            begun = time.perf_counter()
            work()
            self.wait()
            tries.append(time.perf_counter() - begun)
        return min(tries)

    def once(self, work: Callable[[], Any]) -> float:
        """Seconds of its first time."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun

    def held(self) -> int:
        """Bytes of the device in use now; on a CPU of this process."""
        if self.gpu:
            return torch.cuda.memory_allocated(self.device)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak(self, work: Callable[[], Any]) -> int:
        """The most bytes that the device held during some work; on a CPU those after it."""
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return self.most_held()

    def most_held(self) -> int:
        """The most bytes that the device held since they were last counted; on a CPU those now."""
        return torch.cuda.max_memory_allocated(self.device) if self.gpu else self.held()

    def memory(self) -> int:
        """Bytes that the device has."""
        if self.gpu:
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def judged(self, passed: bool) -> bool | None:
        """A mark of speed or of a GPU's memory."""
        return passed if self.gpu else None

    def product_rate(self) -> float:
        """FLOP/s of one large product in bfloat16."""
        width = self.sizes.product
        a = torch.randn(width, width, device=self.device, dtype=torch.bfloat16)
        return 2 * width**3 / self.seconds(lambda: a @ a)

    def most(self) -> tuple[float, str]:
        """FLOP/s that it could do, and who says so."""
        from trireme.trainer.measure import peak_flops

        if peak := peak_flops(self.device, half=True):
            return peak, "of the data sheet"
        return self.product_rate(), "of a large product here"

    def memory_rate(self) -> float:
        """Bytes a second that it reads and writes."""
        a = torch.empty(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        b = torch.empty_like(a)
        return 2 * len(a) / self.seconds(lambda: b.copy_(a))


def versions(machine: Machine) -> Lines:
    """What runs here."""
    import transformers

    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    software = f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}"
    yield Row("versions", "software", f"{software}, transformers {transformers.__version__}")
    name = f"{os.cpu_count()} CPU cores"
    if machine.gpu:
        facts = torch.cuda.get_device_properties(machine.device)
        name = f"{facts.name}, {facts.total_memory / GIB:.1f} GiB, sm{facts.major}{facts.minor}"
    yield Row("versions", "device", name)
    rate, memory = machine.product_rate(), machine.memory_rate()
    figures = {"flops": rate, "bytes_per_s": memory}
    told = f"{rate / 1e12:.2f} TFLOP/s in bfloat16, {memory / 1e9:.1f} GB/s copied"
    yield Row("versions", "a large product, a copy", told, figures=figures)


def sdpa(machine: Machine) -> Lines:
    """Which kernels torch chooses in our processes, and what a shape that is new costs."""
    from trireme.trainer.attention import register

    register()  # as a trainer does: refuses kernels that plan again for every shape
    for dtype in (torch.bfloat16, torch.float32):
        for masked in (True, False):
            chosen = [_backend(machine, dtype, masked, grouped) for grouped in (False, True)]
            what = f"{'masked' if masked else 'causal'}, {str(dtype).removeprefix('torch.')}"
            bad = {"cudnn"} | ({"math"} if dtype is torch.bfloat16 and not masked else set())
            yield Row(
                "sdpa",
                what,
                f"{chosen[0]}; {chosen[1]} with grouped heads",
                "not cudnn" + (", not math" if "math" in bad else ""),
                machine.judged(not bad & {chosen[0]}),
            )
    first, again = 0.0, 0.0
    for n in range(5):
        query, key, value = _rows_of(machine, 200 + 128 * n)
        ahead = torch.ones(1, 1, query.shape[2], key.shape[2], device=machine.device).tril().bool()

        def work(parts: Sequence[Tensor] = (query, key, value), mask: Tensor = ahead) -> None:
            scaled_dot_product_attention(*parts, attn_mask=mask).float().sum().backward()

        first += machine.once(work)
        again += machine.once(work)
    yield Row(
        "sdpa",
        "5 new shapes, forward and backward",
        f"{first:.3f} s, again {again:.3f} s",
        "new at most 0.5 s above known",
        machine.judged(first - again < 0.5),
        {"new_s": first, "known_s": again},
    )


def _rows_of(machine: Machine, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = 1, 4, length, 64
    given = {"device": machine.device, "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(shape, **given) for _ in range(3))
    return query, key, value


def _backend(machine: Machine, dtype: torch.dtype, masked: bool, grouped: bool) -> str:
    def heads(count: int) -> Tensor:
        return torch.randn(1, count, 128, 64, device=machine.device, dtype=dtype)

    mask = torch.ones(1, 1, 128, 128, device=machine.device, dtype=torch.bool) if masked else None
    key = heads(2 if grouped else 4)
    given = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": grouped}
    try:
        return BACKENDS[int(torch.ops.aten._fused_sdp_choice(heads(4), key, key, **given))]
    except RuntimeError as error:
        return str(error).partition("\n")[0][:60]


def tests(machine: Machine) -> Lines:
    """The tests that need a GPU; on a CPU those of its double."""
    import pytest  # noqa: F401 - said before a process is begun that lacks it

    files = ["tests/trainer/test_cuda.py"]
    if machine.gpu:
        files = ["-m", "gpu", "tests/trainer/test_gpu.py", "tests/engines/test_contract.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    yield Row("tests", " ".join(files), said[-1][:120], "all pass", done.returncode == 0)


def made(machine: Machine) -> Path:
    """A model of random weights, Qwen2's shape: 1.5 billion on a GPU."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tests.tiny import make_tokenizer

    path = machine.folder / "model"
    if path.is_dir():
        return path
    s = machine.sizes
    config = Qwen2Config(
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # embeddings as large as a trained model's: those of a new model make all logits alike
    model.get_input_embeddings().weight.data.mul_(4)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def batch_of(sizes: Sizes, tokens: int, *, shared: bool) -> Any:
    """Four groups of two rollouts and more, half of whose tokens are the prompt."""
    from trireme.batch import of_tokens

    rng = torch.Generator().manual_seed(tokens)
    length = max(tokens // 8, 8)
    rows = []
    for _ in range(tokens // length // 2):
        prompt = torch.randint(0, sizes.vocabulary, (length // 2,), generator=rng)
        for _ in range(2):
            if not shared:
                prompt = torch.randint(0, sizes.vocabulary, (length // 2,), generator=rng)
            reply = torch.randint(0, sizes.vocabulary, (length - length // 2,), generator=rng)
            rows.append([*prompt.tolist(), *reply.tolist()])
    return of_tokens(rows)


WARM = 0.7
"""A temperature that bfloat16 has not."""


def backend_on(machine: Machine, ranks: Any = None, **given: Any) -> Any:
    """A trainer of the made-up model."""
    from trireme.config.schema import OptimizerConfig
    from trireme.trainer.backend import Backend
    from trireme.trainer.settings import TrainSettings

    settings = TrainSettings(
        OptimizerConfig(),
        **{
            "max_token_len": 2 * max(machine.sizes.tokens),
            "grad_clip": 1.0,
            "device": str(machine.device),
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
            **given,
        },
    )
    return Backend(made(machine), settings, ranks)


def step(machine: Machine) -> Lines:
    """Train steps of the made-up model."""
    from trireme.config.shape import shape_at
    from trireme.ext.memory.estimate import Use, memory_of
    from trireme.trainer.pack import packed_tokens

    most, says = machine.most()
    shape = shape_at(str(made(machine)))
    backend = backend_on(machine)

    def train(batch: Any) -> None:
        backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.mean())
        backend.step()

    mark = "35 % MFU at 16k tokens; the plan within 15 %, and CUDA's own GiB"
    for tokens in machine.sizes.tokens:
        for shared in (True, False):
            batch = batch_of(machine.sizes, tokens, shared=shared)
            packed = packed_tokens(batch)
            what = f"{tokens} tokens, {'shared prompts' if shared else 'nothing shared'}: {packed}"
            what += " computed"
            facts = {"half": True, "device": machine.device.type, "checkpointing": True}
            plan = 0
            if shape is not None:
                plan = sum(memory_of(shape, Use(1, packed, **facts)).values())
            if plan > machine.memory():
                why = f"the plan has {plan / GIB:.2f} GiB, the GPU {machine.memory() / GIB:.2f}"
                yield Row("step", what, f"skipped: {why}", mark, skipped=True)
                continue
            try:
                seconds = machine.seconds(lambda batch=batch: train(batch), times=2)
                peak = machine.peak(lambda batch=batch: train(batch))
            except torch.cuda.OutOfMemoryError:
                peak = machine.most_held()
                figures: dict[str, float] = {"peak_bytes": peak, "planned_bytes": plan}
                why = f"{peak / GIB:.2f} GiB at most, planned {plan / GIB:.2f}"
                yield Row("step", what, f"failed: out of memory, {why}", mark, False, figures)
                return
            backend.measures.arithmetic.take()
            train(batch)
            use = backend.measures.arithmetic.take() / seconds / most
            yield Row(
                "step",
                what,
                f"{seconds:.3f} s, {use:.1%} MFU ({says}), {peak / GIB:.2f} GiB at most, planned "
                f"{plan / GIB:.2f}",
                mark,
                machine.judged(
                    (use >= 0.35 or tokens != 16384) and abs(plan - peak) < 0.15 * plan + GIB
                ),
                {"seconds": seconds, "mfu": use, "peak_bytes": peak, "planned_bytes": plan},
            )


def blocks(machine: Machine) -> Lines:
    """The same train step with blocks as they are and compiled (`trainer.use_torch_compile`)."""
    most, says = machine.most()
    tokens = machine.sizes.tokens[-2]
    batch = batch_of(machine.sizes, tokens, shared=True)
    seconds: dict[bool, float] = {}
    for compiles in (False, True):
        backend = backend_on(machine, compile=compiles)

        def train(backend: Any = backend) -> None:
            backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.mean())
            backend.step()

        first = machine.once(train)
        seconds[compiles] = machine.seconds(train, times=2)
        backend.measures.arithmetic.take()
        train()
        use = backend.measures.arithmetic.take() / seconds[compiles] / most
        yield Row(
            "blocks",
            f"{'compiled' if compiles else 'eager'}, {tokens} tokens with shared prompts",
            f"{seconds[compiles]:.3f} s, {use:.1%} MFU ({says}), the first {first:.1f} s",
            "compiled at most as long as eager",
            machine.judged(seconds[compiles] <= seconds[False]),
            {"seconds": seconds[compiles], "mfu": use, "first_seconds": first},
        )
        del backend


def kernels(machine: Machine) -> Lines:
    """Attention of one layer over a trie, forward and backward, by each kernel that there is."""
    from trireme.trainer.attention import choose_kernel
    from trireme.trainer.pack import pack

    s, seconds = machine.sizes, {}
    tokens, width = s.tokens[-2], s.hidden // s.heads
    sizes = {"device": machine.device, "dtype": torch.bfloat16, "requires_grad": True}
    shape = {"heads": s.heads, "key_heads": s.key_heads, "width": width}
    for asked in ("sdpa", "varlen", "flex"):
        what = f"{asked}, {tokens} tokens with shared prompts"
        try:
            kernel = choose_kernel(asked, machine.device, half=True, **shape)
        except ValueError as error:
            verdict = machine.judged(False)
            yield Row("kernels", what, f"not here: {error}"[:200], "it works on a GPU", verdict)
            continue
        batch = batch_of(s, tokens, shared=True)
        packed = pack(batch, align=machine.device.type == "cuda", kernel=kernel).to(machine.device)
        counts = s.heads, s.key_heads, s.key_heads
        rows = [torch.randn(1, n, len(packed.tokens), width, **sizes) for n in counts]

        def work(packed: Any = packed, rows: Sequence[Tensor] = rows) -> None:
            out = packed.attention.attend(*rows, window=0, scale=None)
            out.float().sum().backward()

        seconds[asked] = machine.seconds(work)
        peak = machine.peak(work)
        yield Row(
            "kernels",
            what,
            f"{seconds[asked]:.4f} s a layer, {peak / GIB:.2f} GiB at most",
            "at most 1.1 times sdpa's",
            machine.judged(seconds[asked] <= 1.1 * seconds["sdpa"]),
            {"seconds": seconds[asked], "peak_bytes": peak},
        )


def head(machine: Machine) -> Lines:
    """The output head beside its products, four where logits are too many to be stored,
    else three; and its gradient beside float64.
    """
    from types import SimpleNamespace

    from trireme.config.memory import STORED_LOGITS
    from trireme.trainer.head import score_entries

    s = machine.sizes
    config = SimpleNamespace(vocab_size=s.vocabulary)
    config.get_text_config = lambda: config

    def scored(linear: Any, hidden: Tensor, targets: Tensor) -> None:
        model: Any = SimpleNamespace(config=config, get_output_embeddings=lambda: linear)
        at = torch.arange(len(hidden), device=hidden.device)
        heat = torch.ones(len(hidden), device=hidden.device)
        score_entries(model, hidden, at, targets, heat, entropy=False)[0].sum().backward()

    def parts(entries: int, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(entries, s.hidden).to(machine.device, dtype).requires_grad_()
        linear = torch.nn.Linear(s.hidden, s.vocabulary, bias=False).to(machine.device, dtype)
        targets = torch.randint(0, s.vocabulary, (entries,)).to(machine.device)
        return linear, hidden, targets

    linear, hidden, targets = parts(s.head_entries, torch.bfloat16)
    before = machine.held()
    peak = machine.peak(lambda: scored(linear, hidden, targets)) - before
    seconds = machine.seconds(lambda: scored(linear, hidden, targets), times=2)
    chunk, count = min(1024, s.head_entries), -(-s.head_entries // 1024)
    few = hidden.detach()[:chunk]
    logits = few @ linear.weight.detach().T
    again = s.head_entries * s.vocabulary > STORED_LOGITS[machine.device.type]

    def products() -> None:
        for _ in range(count):
            for _ in range(1 + again):
                torch.matmul(few, linear.weight.detach().T, out=logits)
            torch.matmul(logits, linear.weight.detach())
            torch.matmul(logits.T, few)

    least = machine.seconds(products, times=2)
    yield Row(
        "head",
        f"{s.head_entries} entries, {s.vocabulary} ids",
        f"{seconds:.3f} s, its products {least:.3f} s, {peak / GIB:.2f} GiB more at most",
        "at most twice its products",
        machine.judged(seconds <= 2 * least),
        {"seconds": seconds, "products_s": least, "peak_bytes": peak},
    )
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        few_of = parts(64, dtype)
        scored(*few_of)
        gradients.append(few_of[0].weight.grad.double())
    error = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    yield Row(
        "head",
        "gradient in bfloat16 beside float64",
        f"{error:.2%} apart",
        "at most 1 %",
        error < 0.01,
        {"error": error},
    )


def gap(machine: Machine) -> Lines:
    """By how much bfloat16 tells two computations of one model apart."""
    from trireme.engines.device import Device
    from trireme.engines.engine import Sampling
    from trireme.sync.probe import AT_START, LEAST, TIMES, Gap

    trainer = backend_on(machine)
    length = min(256, machine.sizes.gap_tokens // 2)

    async def sampled() -> tuple[list[list[int]], list[list[float]]]:
        device = Device()
        engine = engine_on(machine, device)
        try:
            prompt = list(range(5, 13))
            asked = Sampling(
                max_tokens=length - 8, n=machine.sizes.gap_tokens // length, ignore_eos=True
            )
            replies = await engine.generate(prompt, asked)
            rows = [prompt + reply.ids for reply in replies]
            return rows, await engine.logprobs(rows)
        finally:
            await engine.close()
            device.close()

    rows, engines = asyncio.run(sampled())
    together = trainer.score(rows)
    alone = [trainer.score([row])[0] for row in rows]
    for what, other in (("the trainer and its engine", engines), ("one row at a time", alone)):
        pairs = [[0.0], [0.0]]
        for one, two in zip(together, other, strict=True):
            pairs[0] += two[1:]
            pairs[1] += one[1:]
        found = Gap.of(*pairs)
        limit = TIMES * LEAST["bfloat16"][0]
        yield Row(
            "gap",
            f"{what}, {len(pairs[0]) - 1} tokens",
            f"mean {found.mean:.4f}, p95 {found.p95:.4f}, max {found.largest:.3f} nats",
            f"mean at most {limit:g} (a run stops past {AT_START:g})",
            found.mean <= limit,
            {"mean": found.mean, "p95": found.p95, "max": found.largest},
        )


def engine_on(machine: Machine, device: Any) -> Any:
    """The embedded engine with weights of its own."""
    from transformers import AutoTokenizer

    from trireme.engines.torch.engine import TorchEngine
    from trireme.engines.torch.shell import TorchSettings

    folder = made(machine)
    return TorchEngine(
        folder,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        device=device,
        settings=TorchSettings(
            max_model_len=4096, dtype="bfloat16", device=str(machine.device), prefix_tokens=0
        ),
    )


def decode(machine: Machine) -> Lines:
    """Tokens that the embedded engine draws a second, beside what reading its weights takes."""
    from trireme.config.shape import shape_at
    from trireme.engines.device import Device
    from trireme.engines.engine import Sampling

    bandwidth = machine.memory_rate()
    shape = shape_at(str(made(machine)))
    assert shape is not None
    s = machine.sizes

    async def measured() -> list[tuple[int, float]]:
        device = Device()
        engine = engine_on(machine, device)
        found = []
        try:
            for rows in s.rows:
                asked = Sampling(max_tokens=s.new_tokens, n=rows, ignore_eos=True)
                await engine.generate([5, 6, 7], Sampling(max_tokens=4, n=rows, ignore_eos=True))
                begun = time.perf_counter()
                await engine.generate([5, 6, 7], asked)
                found.append((rows, rows * s.new_tokens / (time.perf_counter() - begun)))
        finally:
            await engine.close()
            device.close()
        return found

    for rows, rate in asyncio.run(measured()):
        cache = rows * s.new_tokens / 2 * 4 * shape.key_width * shape.layers
        floor = rows / ((2 * shape.weights + cache) / bandwidth)
        yield Row(
            "decode",
            f"{rows} rows of {s.new_tokens} tokens",
            f"{rate:,.0f} tokens/s, {rate / floor:.1%} of what memory allows",
            "at least 30 %, or generate with vLLM",
            machine.judged(rate >= 0.3 * floor),
            {"tokens_per_s": rate, "floor_tokens_per_s": floor},
        )


def ranks(machine: Machine) -> Lines:
    """One FSDP2 rank over NCCL (gloo on a CPU) beside no ranks, by scores of the same model: in
    float32, and at a temperature in bfloat16 with each kernel. There the model is an adapter's
    base, which is in bfloat16 in both, so that both round alike.
    """
    from trireme.trainer.lora import Lora
    from trireme.trainer.ranks import Ranks, RankSpec, free_address

    kind = "cuda:0" if machine.gpu else "cpu"
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 12, 4], [40, 41, 42]]  # two share a prompt
    over = f"FSDP2, one rank over {'NCCL' if machine.gpu else 'gloo'}"
    group = Ranks(RankSpec(0, 1, free_address(), device=kind, timeout=120.0, lost_after=120.0))
    half: dict[str, Any] = {"dtype": "bfloat16", "lora": Lora(rank=4)}
    cases: list[tuple[str, float, dict[str, Any]]] = [("float32", 1.0, {"dtype": "float32"})]
    for kernel in ("sdpa", "varlen", "flex"):
        options = {**half, "attn_implementation": kernel}
        cases.append((f"bfloat16 at temperature {WARM} with {kernel}", WARM, options))
    try:
        for what, heat, options in cases:
            try:
                alone, spread = (
                    backend_on(machine, ranks=ranks, max_token_len=4096, **options)
                    for ranks in (None, group)
                )
            except ValueError as error:
                verdict = machine.judged(False)
                why = f"not here: {error}"[:200]
                yield Row("ranks", f"{over}, in {what}", why, "it works on a GPU", verdict)
                continue
            expected, found = (one.score(rows, temperature=heat) for one in (alone, spread))
            apart = max(abs(a - b) for one, two in zip(expected, found, strict=True)
                        for a, b in zip(one, two, strict=True))  # fmt: skip
            yield Row(
                "ranks",
                f"{over}, in {what}",
                f"{apart:.2g} nats from one process",
                "at most 1e-3",
                apart <= 1e-3,
                {"apart": apart},
            )
            if heat == 1.0:
                continue
            rounded = float(torch.tensor(heat, dtype=torch.bfloat16))
            yield Row(
                "ranks",
                f"{over}, in {what}: that temperature is not rounded to {rounded:.4f}",
                "other scores" if spread.score(rows, temperature=rounded) != found else "the same",
                "other scores",
                spread.score(rows, temperature=rounded) != found,
            )
    finally:
        group.close()


MEMBER = """
import sys
from trireme.ext.remote.weight_group import Meeting, WeightGroup
group = WeightGroup(Meeting("127.0.0.1", int(sys.argv[1]), 2, 1, sys.argv[2], timeout=60))
group.connect()
for _ in range(2):
    print(sum(tensor.nbytes for _, tensor in group.receive()), flush=True)
"""


def sync(machine: Machine) -> Lines:
    """Weights to a second process: over gloo, and lent as handles of the device's own memory."""
    count = max(machine.sizes.copy_bytes // 2**24, 1)
    tensors = [
        (f"{n}", torch.zeros(2**23, dtype=torch.bfloat16, device=machine.device))
        for n in range(count)
    ]
    rate, arrived = pushed(machine, tensors, "gloo")
    yield Row(
        "sync",
        "gloo, to a second process",
        f"{rate / 1e9:.2f} GB/s",
        "all bytes arrive",
        arrived,
        {"bytes_per_s": rate},
    )
    rate, arrived = pushed(machine, tensors, "ipc")
    yield Row(
        "sync",
        "buckets lent to a second process, by handles of CUDA memory (of shared memory on a CPU)",
        f"{rate / 1e9:.2f} GB/s",
        "all bytes arrive, at least 50 GB/s",
        machine.judged(rate >= 50e9) if arrived else False,
        {"bytes_per_s": rate},
    )


def pushed(machine: Machine, tensors: list[tuple[str, Tensor]], backend: str) -> tuple[float, bool]:
    """Bytes a second of a push to a second process, and whether all came, twice."""
    from trireme.ext.remote.weight_group import Meeting, WeightGroup

    device = machine.device if backend == "ipc" else None
    group = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, backend, timeout=60), device)
    command = [sys.executable, "-c", MEMBER, str(group.port), backend]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as member:
        try:
            group.connect({1: "the second process"})
            group.send(tensors)
            seconds = machine.once(lambda: group.send(tensors))
            said = member.communicate(timeout=60)[0].split()
        finally:
            member.kill()
    size = sum(tensor.nbytes for _, tensor in tensors)
    return size / seconds, said == [str(size)] * 2


HALVES: tuple[tuple[Callable[[Machine], Lines], ...], ...] = (
    (versions, ranks, sync, sdpa, kernels, head, tests),
    (step, gap, decode, blocks),
)
HALF_S = 9 * 60
"""Of a half: no line begins that could not end in it."""
LINES = HALVES[0] + HALVES[1]
NEEDED = {
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "accelerate": "accelerate",
    "pydantic": "pydantic",
    "annotated_types": "annotated-types",
    "pytest": "pytest",
}
"""Modules that lines import, and the packages that have them."""


def lacking() -> list[str]:
    """The packages of `NEEDED` that this interpreter has not, with the versions that were tried."""
    missing = []
    for module, package in NEEDED.items():
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is None:
            tried = re.search(rf"^{package}==\S+", (ROOT / "constraints.txt").read_text(), re.M)
            missing.append(tried[0] if tried else package)
    return missing


def reason(error: BaseException, machine: Machine) -> str:
    """Why a line was not measured, in one sentence."""
    if isinstance(error, ImportError) and error.name:
        return f"skipped: this interpreter has no {error.name}"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        peak, has = machine.most_held() / GIB, machine.memory() / GIB
        return f"failed: out of memory, {peak:.2f} GiB at most, of {has:.2f}"
    text = str(error).strip().partition("\n")[0]
    return f"failed: {type(error).__name__}: {text[:160]}"


Line = Callable[[Machine], Lines]
LIMIT_S = 300
"""Of a line in a process of its own."""
ENDS_S = 30
"""Until such a process that hangs has said where."""
LEAST_S = 60
"""Without so many a line is not begun."""
_ROW = "row of the report: "
"""How what such a process says of its line begins."""


def here(machine: Machine, line: Line) -> Lines:
    """Its rows, measured in this process; a last one where it cannot go on."""
    try:
        yield from line(machine)
    except Exception as error:  # the other lines continue
        why = reason(error, machine)
        missed = why.startswith("failed")
        yield Row(line.__name__, "", why, passed=False if missed else None, skipped=not missed)
    gc.collect()
    if machine.gpu:
        torch.cuda.empty_cache()


def apart(machine: Machine, line: Line, limit: float | None = None) -> Lines:
    """Its rows, measured in a process of its own; a last one where that has not ended well."""
    limit = limit or LIMIT_S
    where = ["--device", str(machine.device), "--child", str(machine.folder)]
    where += ["--seconds", f"{limit:.0f}"]
    command = [sys.executable, str(Path(__file__).resolve()), *where, "--lines", line.__name__]
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=told, text=True, start_new_session=True
        ) as child,
    ):

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit + ENDS_S, end)  # before that, it reports where it hangs
        timer.start()
        try:
            assert child.stdout is not None
            for text in child.stdout:
                if text.startswith(_ROW):
                    yield Row(**json.loads(text.removeprefix(_ROW)))
            code = child.wait()
        finally:
            timer.cancel()
            end()
        told.seek(0)
        if code:
            yield Row(line.__name__, "", ending(code, told.read(), limit), passed=False)


def ending(code: int, told: str, limit: float) -> str:
    """Why a line's process ended, by its exit code and what it said, and where in the code."""
    from trireme.processes import signal_name

    lines = told.strip().splitlines()
    why = f"exit code {code}: {lines[-1][:160] if lines else 'it said nothing'}"
    if "Timeout (" in told:
        why = f"it did not end in {limit:.0f} s"
    elif code < 0:
        why = f"its process ended by {signal_name(-code)}"
    mine = [text.strip() for text in lines if str(ROOT) in text and ", line " in text]
    return f"failed: {why}" + (f"; {mine[0]}".replace(f"{ROOT}/", "") if mine else "")


def too_late(_: Machine, line: Line) -> Lines:
    """A row for a line that is not begun."""
    yield Row(line.__name__, "", f"skipped: no time left of {HALF_S} s", skipped=True)


def report(
    machine: Machine,
    lines: Sequence[Line],
    file: Path,
    *,
    isolated: bool,
    limit: float | None = None,
) -> list[Row]:
    """All rows, each printed as soon as it is there, and those so far in a file after each line.
    With a limit in seconds no line begins that could outlast it.
    """
    print("| line | what | measured | to pass | |\n|-|-|-|-|-|", flush=True)
    rows: list[Row] = []
    started = time.perf_counter()
    for line in lines:
        begun = time.perf_counter()
        left = None if limit is None else limit - (begun - started)
        measure = apart if isolated else here
        if left is not None and left < LEAST_S:
            measure = too_late
        elif left is not None and isolated:
            measure = partial(apart, limit=min(left - ENDS_S, LIMIT_S))
        for row in measure(machine, line):
            rows.append(row)
            print(row, flush=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        part.replace(file)
        print(f"{line.__name__}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return rows


def say_rows(machine: Machine, lines: Sequence[Line], limit: float) -> None:
    """To the process that began this one; where it hangs or crashes, it says where."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    for line in lines:
        for row in here(machine, line):
            print(_ROW + json.dumps(asdict(row)), flush=True)


def chosen_device(asked: str | None) -> torch.device:
    """`cuda` with its index. Exits with a sentence where there is none."""
    kind = asked or "cuda"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit(
            f"gpu_report: torch {torch.__version__} sees no GPU (--device cpu runs small sizes)"
        )
    device = torch.device(kind)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def main() -> int:
    """The exit code: 1 where a mark was missed or a line failed, 2 where one was not measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="cuda (the default), cuda:N or cpu")
    parser.add_argument(
        "--json", type=Path, help="gpu_report.json, or gpu_report_1.json of --half 1"
    )
    names = ", ".join(line.__name__ for line in LINES)
    parser.add_argument("--lines", help=f"some of {names}, with commas between")
    text = f"a half of the lines, in at most {HALF_S // 60} minutes"
    parser.add_argument("--half", type=int, choices=(1, 2), help=text)
    text = "each line in a process of its own, as on a GPU"
    parser.add_argument("--apart", action="store_true", help=text)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [line.__name__ for line in (HALVES[options.half - 1] if options.half else LINES)]
    wanted = options.lines.split(",") if options.lines else wanted
    unknown = [name for name in wanted if name not in {line.__name__ for line in LINES}]
    if unknown:
        sys.exit(f"gpu_report: --lines has no '{unknown[0]}'. It has: {names}")
    device = chosen_device(options.device)
    sizes = CPU if device.type == "cpu" else GPU
    lines = [line for line in LINES if line.__name__ in wanted]
    if options.child is not None:
        say_rows(Machine(device, sizes, options.child), lines, options.seconds)
        return 0
    file = options.json or Path(
        f"gpu_report_{options.half}.json" if options.half else "gpu_report.json"
    )
    if missing := lacking():
        print(
            f"gpu_report: {sys.executable} lacks packages, without which lines are not measured:\n"
            f"  {sys.executable} -m pip install {' '.join(missing)}\n",
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        machine, isolated = (
            Machine(device, sizes, Path(folder)),
            options.apart or device.type == "cuda",
        )
        limit = HALF_S if options.half else None
        rows = report(machine, lines, file, isolated=isolated, limit=limit)
    missed = [row for row in rows if row.passed is False]
    skipped = {row.line for row in rows if row.skipped}
    print(
        f"\n{len(lines) - len(skipped)} measured, {len(skipped)} not"
        + (f" ({', '.join(sorted(skipped))})" if skipped else "")
        + f"; {len(missed)} of {len(rows)} rows missed their mark; {file}"
    )
    return 1 if missed else 2 * bool(skipped)


if __name__ == "__main__":
    sys.exit(main())
