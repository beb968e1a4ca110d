"""Worker: our methods in each of vLLM's worker processes, called by collective_rpc.

New weights arrive in Hugging Face's form and by vLLM's own calls, see transfer.py; an adapter
arrives by ours. On a CPU vLLM packs weights for its products; if the head is tied to the embedding,
a reload repacks only one of the two, and the head continues with the old one; experts are packed
only at the start, and new ones are assumed to be packed. Both are repacked here.

vLLM's sampler reports one number per token, raw or of the sampled distribution; the Engine's
contract has both, the raw one at the temperature, and the weights' version. So our sampler's row of
log-probabilities is [sampled token, (-1 - version, the sampler's), likeliest, second likeliest,
...]. No token has a negative id. It samples as the embedded engine does, with one hashed number per
token: vLLM has a random generator for each request, which a GPU uses row by row. It is written for
the Sampler of vLLM 0.32 (vllm/v1/sample/sampler.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.engines.adapter import A, B
from trireme.engines.sampling import inverse_cdf, log_probabilities, uniforms
from trireme.engines.weights import fingerprint
from trireme.ext.vllm.adapter_files import write_adapter
from trireme.ext.vllm.options import ADAPTER, STREAM
from trireme.ext.vllm.routing import SlotRouting
from trireme.ext.vllm.transfer import Arriving, GroupTransfer, read
from trireme.serialize import array_to_wire

_outputs: Any = import_module("vllm.v1.outputs")
_ops: Any = import_module("vllm.v1.sample.ops.topk_topp_sampler")
Sampler: Any = import_module("vllm.v1.sample.sampler").Sampler

SCORED_AT_ONCE = 2**26
"""Float32 numbers of a prompt's logits: 256 MiB."""
GREEDY_BELOW = 1e-5
"""vLLM's: lower temperatures are greedy."""


class ContractSampler(Sampler):
    """Replaces a model runner's sampler."""

    def __init__(self, runner: Any) -> None:
        """`runner` knows each row's request, and the number of its tokens."""
        super().__init__("processed_logprobs")
        self._runner = runner
        self._rows: tuple[list[str], Tensor, bool] = ([], torch.zeros(0, dtype=torch.long), False)
        """Ids of the last step's requests, their random streams, and whether all of them sample
        from the model's own distribution."""
        self.version = 0
        self.score_temperature = 1.0
        """Of prompts that are scored."""

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        """Return sampled ids [B, 1] and rows of log-probabilities, see the module."""
        wanted = sampling_metadata.max_num_logprobs
        greedy = None
        heat = sampling_metadata.temperature  # None: all are greedy
        full = logits.float()
        if heat is not None:
            greedy = heat < GREEDY_BELOW
            full = full / torch.where(greedy, 1.0, heat)[:, None]
        full = log_probabilities(full)  # before the logits are changed in place
        if self._known()[2]:
            drawn = full
            if greedy is None:
                sampled = self.greedy_sample(logits.float())
            else:
                sampled = self._draw(full)
                if not sampling_metadata.all_random:
                    likeliest = self.greedy_sample(logits.float()).long()
                    sampled = torch.where(greedy, likeliest, sampled)
        else:
            bent = self.apply_logits_processors(
                logits.to(torch.float32), sampling_metadata, predict_bonus_token
            )
            sampled, drawn = self.sample(bent, sampling_metadata)
        at = sampled.long()[:, None]
        tensors = None
        if wanted:
            assert drawn is not None
            own = drawn.gather(-1, at)
            own = torch.zeros_like(own) if greedy is None else own.masked_fill(greedy[:, None], 0)
            best, likeliest = full.topk(wanted - 1, dim=-1)
            version = torch.full_like(at, -1 - self.version)
            tensors = _outputs.LogprobsTensors(
                torch.cat((at, version, likeliest), dim=1).to(torch.int32),
                torch.cat((full.gather(-1, at), own, best), dim=1),
                torch.zeros_like(at[:, 0]),
            )
        return _outputs.SamplerOutput(
            sampled_token_ids=at.to(torch.int32), logprobs_tensors=tensors
        )

    def sample(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        logprobs_mode_override: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return sampled ids [B], and log p [B, V] of the sampled distributions; `logits` are
        overwritten.

        min-p is applied last, as in the embedded engine: vLLM applies it before top-p.
        """
        if sampling_metadata.all_greedy:
            return self.greedy_sample(logits), log_probabilities(logits)
        heat = sampling_metadata.temperature
        likeliest = None if sampling_metadata.all_random else self.greedy_sample(logits)
        logits = self.apply_temperature(logits, heat, sampling_metadata.all_random)
        logits = _ops.apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        drawn = log_probabilities(logits)
        sampled = self._draw(drawn)
        if likeliest is not None:
            sampled = torch.where(heat < GREEDY_BELOW, likeliest.long(), sampled)
        return sampled, drawn

    def _draw(self, logprobs: Tensor) -> Tensor:
        """Sample ids [B] from log p [B, V], with each row's random number of its next token, which
        is the same however often its request was interrupted.
        """
        batch, rows = self._runner.input_batch, len(logprobs)
        if batch.num_reqs != rows:
            raise RuntimeError(f"{rows} rows are sampled for {batch.num_reqs} requests of vLLM's")
        positions = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        drawn = uniforms(self._known()[1], torch.from_numpy(positions).long())
        return inverse_cdf(logprobs, drawn.to(logprobs.device, non_blocking=True))

    def _known(self) -> tuple[list[str], Tensor, bool]:
        """Return what is known of this step's requests."""
        batch = self._runner.input_batch
        if self._rows[0] != batch.req_ids:
            params = [self._runner.requests[name].sampling_params for name in batch.req_ids]
            # scored rows have none, and their samples are ignored
            streams = [(one.extra_args or {}).get(STREAM, 0) for one in params]
            plain = all(map(_is_plain, params))
            self._rows = list(batch.req_ids), torch.tensor(streams), plain
        return self._rows

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Return the logits of prompts unchanged: `gather_logprobs` computes the requested values.
        Greedy rows are passed here too; their results are not read.
        """
        return logits

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Return log-softmax(logits / temperature) of only the prompt's own tokens [T], without
        ranks.

        A few rows at a time: for a long prompt over a large vocabulary, float32 copies of all
        logits would be gigabytes, which vLLM has not left free.
        """
        at = token_ids[:, None]
        rows = max(SCORED_AT_ONCE // logprobs.shape[-1], 1)
        scores = torch.cat(
            [
                log_probabilities(logits.float() / self.score_temperature).gather(-1, own)
                for logits, own in zip(logprobs.split(rows), at.split(rows), strict=True)
            ]
        )
        ranks = torch.zeros_like(token_ids)
        return _outputs.LogprobsTensors(at.to(torch.int32), scores, ranks)


def _is_plain(params: Any) -> bool:
    """True if nothing is cut off the distribution of these sampling parameters, nor added: one
    log-softmax is then both numbers of a token. By the parameters that engine.py sets.
    """
    cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params._bad_words_token_ids
    return not cut and params.repetition_penalty == 1 and params.min_tokens == 0


class TriremeWorker:
    """An extension of vLLM's Worker; its names begin with ours."""

    model_runner: Any
    parallel_config: Any
    weight_transfer_engine: GroupTransfer

    def trireme_prepare(self, names: Sequence[str], dtype: str) -> None:
        """Install our sampler. `names`: the tensors that new weights must contain."""
        held = getattr(self.model_runner, "sampler", None)
        if type(held) is not Sampler:
            raise RuntimeError(
                f"this vLLM samples with {type(held).__name__}, from which log-probabilities as "
                "Trireme records them cannot be had: expected its V1 model runner"
            )
        self.model_runner.sampler = ContractSampler(self.model_runner)
        self.weight_transfer_engine.names = set(names)
        self._trireme_dtype = dtype
        self._trireme_marks: dict[str, float] | None = None
        self._trireme_base: dict[str, float] | None = None

    def trireme_record_routing(self) -> None:
        """Record the experts of all tokens from now on."""
        self._trireme_routing = SlotRouting(self.model_runner)

    def trireme_routing(self, name: str, given_up: Sequence[str]) -> dict[str, Any] | None:
        """Return the experts of a request's tokens, once, and forget those of requests that were
        `given_up`: see SlotRouting.
        """
        self._trireme_routing.forget(given_up)
        taken = self._trireme_routing.take(name)
        return None if taken is None else array_to_wire(taken)

    def trireme_set_version(self, version: int) -> None:
        """Set the version of tokens sampled from now on."""
        self.model_runner.sampler.version = version

    def trireme_score_at(self, temperature: float) -> None:
        """Set the temperature at which prompts are scored from now on."""
        self.model_runner.sampler.score_temperature = temperature

    def trireme_settle(self) -> None:
        """Note that all new weights have arrived by `weight_transfer_engine`."""
        self.trireme_mend()
        marks = self.weight_transfer_engine.marks
        self._trireme_marks = marks | self._trireme_used_marks(marks)

    def trireme_adapt(self, update: Mapping[str, str]) -> None:
        """Load an adapter in place of the last one, in vLLM's way. `update`: see Arriving."""
        self._trireme_marks = None
        adapter = dict(self.weight_transfer_engine.arriving(Arriving(**update), adapter=True))
        requests: Any = import_module("vllm.lora.request")
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="trireme-adapter-", dir=shared) as folder:
            write_adapter(Path(folder), adapter)
            self.model_runner.remove_lora(ADAPTER[1])
            self.model_runner.add_lora(requests.LoRARequest(*ADAPTER, folder))
        if self._trireme_base is None:
            self._trireme_base = self._trireme_base_marks()
        alone = self.parallel_config.world_size == 1
        used = _used_adapter(self.model_runner.get_model(), adapter) if alone else adapter
        self._trireme_marks = self._trireme_base | fingerprint(used, self._trireme_dtype)

    def trireme_fingerprint(self) -> dict[str, float] | None:
        """Return the fingerprints of the last received weights (engines/fingerprint.py); None at
        first.
        """
        return self._trireme_marks

    def trireme_mend(self) -> None:
        """Repack the parts that vLLM's reload leaves out on a CPU: a tied head, from the
        embedding's new weight, and experts, which vLLM packs only at its start.
        """
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)
            kernel, weight = (
                getattr(method, "moe_kernel", None),
                getattr(module, "w13_weight", None),
            )
            if kernel is not None and weight is not None and weight.device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(module)

    def _trireme_base_marks(self) -> dict[str, float]:
        """Fingerprint the loaded files, and the weights as the layers use them as far as that is
        known.
        """
        marks: dict[str, float] = {}
        for name, tensor in read(Path(self.model_runner.model_config.model)):
            marks |= fingerprint({name: tensor}, self._trireme_dtype)
        return marks | self._trireme_used_marks(marks)

    def _trireme_used_marks(self, marks: Mapping[str, float]) -> dict[str, float]:
        """Fingerprint the weights named in `marks` as the layers use them; empty if
        they are split.
        """
        if self.parallel_config.world_size > 1:
            return {}
        used = _used(self.model_runner.get_model())
        known = {n: t for n, t in used.items() if n in marks or n == "lm_head.weight"}
        return fingerprint(known, self._trireme_dtype)


@torch.no_grad()
def _used(model: Any) -> dict[str, Tensor]:
    """Return the weights that the layers use, by Hugging Face names, as far as they can be
    determined.

    A layer's weight is its product with the unit vectors, packed or not: exact, since all other
    products are 0. Layers that fuse several of Hugging Face's are split into their parts.
    """
    out: dict[str, Tensor] = {}
    fused = getattr(model, "packed_modules_mapping", {})
    config = getattr(model, "config", None)
    # without the rows that vLLM adds to embeddings
    vocabulary = None if config is None else config.get_text_config().vocab_size
    for inner, module in model.named_modules():
        path = inner.removesuffix(".base_layer")  # of a layer that can have an adapter
        owner, _, leaf = path.rpartition(".")
        kind = type(module).__name__
        if kind in ("ParallelLMHead", "VocabParallelEmbedding"):
            weight = _effective(module) if kind == "ParallelLMHead" else module.weight
            out[f"{path}.weight"] = weight[:vocabulary]
        elif hasattr(module, "quant_method") and hasattr(module, "input_size"):
            weight = _effective(module)
            names = fused.get(leaf, [leaf])
            sizes = getattr(module, "output_partition_sizes", None) or [len(weight)]
            if len(names) == len(sizes) and sum(sizes) == len(weight):
                parts = zip(names, weight.split(sizes), strict=True)
                out |= {f"{owner}.{name}.weight": part for name, part in parts}
        elif isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 1:
            out[f"{path}.weight"] = weight
    return out


def _used_adapter(model: Any, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's tensors in the layers; those in no layer are missing."""
    out: dict[str, Tensor] = {}
    fused = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        owner, _, leaf = path.rpartition(".")
        slices = zip(
            fused.get(leaf, [leaf]),
            getattr(module, "lora_a_stacked", ()),
            getattr(module, "lora_b_stacked", ()),
            strict=False,
        )
        for name, a, b in slices:
            stem = f"{owner}.{name}"
            if stem + A in adapter:
                rank = len(adapter[stem + A])
                out[stem + A], out[stem + B] = a[0, 0, :rank], b[0, 0, :, :rank]
    return out


def _effective(module: Any) -> Tensor:
    """Return [out, in]: the weight that the layer multiplies by."""
    if not hasattr(module, "cpu_linear"):
        return module.weight
    width = getattr(module, "input_size", None) or module.embedding_dim
    unit = torch.eye(width, dtype=module.weight.dtype)
    return module.quant_method.apply(module, unit, None).T
