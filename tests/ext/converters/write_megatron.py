"""Writes Megatron checkpoints of Hugging Face models: one process a rank, gloo, on the CPU.

    python -m tests.ext.converters.write_megatron MODEL_DIR OUT_DIR stacked|numbered|singleton ...

Weights go into Megatron's modules, tensor parallel 2 by pipeline parallel 2, by loops written from
Megatron's own layout, with nothing of the converter. The last stage leaves what Megatron's forward
makes of the tokens 1..12 in OUT_DIR/../logits.pt.
"""

# pyright: reportMissingImports=false
# megatron-core has an environment of its own

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

TENSOR, PIPELINE = 2, 2
METADATA: dict[str, dict[str, bool]] = {
    "stacked": {"non_homogeneous_layers": False},
    "numbered": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True, "non_homogeneous_layers": True},
}


def pretend_that_the_cpu_is_a_gpu() -> None:
    """Megatron calls these on any device."""
    from megatron.core import tensor_parallel

    tracker = SimpleNamespace(fork=nullcontext)  # of random states, for dropout: there is none
    tensor_parallel.get_cuda_rng_tracker = lambda: tracker
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


def make_megatron(config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    qk_norm = config.model_type == "qwen3"
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        transformer,
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
        vocab_size=128,  # 100 padded
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )


def rows_of(weight: Tensor, rank: int) -> Tensor:
    return weight.chunk(TENSOR)[rank]


def fused_attention(layer: Any, kind: str, config: Any, rank: int) -> Tensor:
    """Group after group of this rank: its query heads, its key head, its value head."""
    attention = layer.self_attn
    groups = config.num_key_value_heads
    q = getattr(attention.q_proj, kind).chunk(config.num_attention_heads)
    k = getattr(attention.k_proj, kind).chunk(groups)
    v = getattr(attention.v_proj, kind).chunk(groups)
    heads = len(q) // groups
    rows: list[Tensor] = []
    for group in range(rank * groups // TENSOR, (rank + 1) * groups // TENSOR):
        rows += [*q[group * heads : (group + 1) * heads], k[group], v[group]]
    return torch.cat(rows)


def values(hf: Any, config: Any, first_layer: int, rank: int) -> dict[str, Tensor]:
    """Each parameter of this rank's stage, by Megatron's name."""
    padded = torch.zeros(128, config.hidden_size)
    padded[: config.vocab_size] = hf.model.embed_tokens.weight
    head = torch.full((128, config.hidden_size), 7.0)  # padding that would be seen
    head[: config.vocab_size] = hf.lm_head.weight
    made = {
        "embedding.word_embeddings.weight": rows_of(padded, rank),
        "decoder.final_layernorm.weight": hf.model.norm.weight,
        "output_layer.weight": rows_of(padded if config.tie_word_embeddings else head, rank),
    }
    for here, layer in enumerate(hf.model.layers[first_layer:]):
        name = f"decoder.layers.{here}."
        gate, up = (
            rows_of(layer.mlp.gate_proj.weight, rank),
            rows_of(layer.mlp.up_proj.weight, rank),
        )
        made |= {
            name + "input_layernorm.weight": layer.input_layernorm.weight,
            name + "pre_mlp_layernorm.weight": layer.post_attention_layernorm.weight,
            name + "mlp.linear_fc1.weight": torch.cat([gate, up]),
            name + "mlp.linear_fc2.weight": layer.mlp.down_proj.weight.chunk(TENSOR, 1)[rank],
            name + "self_attention.linear_proj.weight": layer.self_attn.o_proj.weight.chunk(
                TENSOR, 1
            )[rank],
        }
        kinds = ("weight", "bias") if config.model_type == "qwen2" else ("weight",)
        for kind in kinds:
            made[f"{name}self_attention.linear_qkv.{kind}"] = fused_attention(
                layer, kind, config, rank
            )
        if config.model_type == "qwen3":
            made[name + "self_attention.q_layernorm.weight"] = layer.self_attn.q_norm.weight
            made[name + "self_attention.k_layernorm.weight"] = layer.self_attn.k_norm.weight
    return made


def forward(model: Any, config: Any) -> Tensor | None:
    """Logits [1, T, V] on the last stage, by Megatron itself; None on the first."""
    from megatron.core import parallel_state

    ids = torch.arange(1, 13)[None]
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    group = parallel_state.get_pipeline_model_parallel_group()
    last = parallel_state.is_pipeline_last_stage()
    if last:
        hidden = torch.empty(length, 1, config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
        model.set_input_tensor(hidden)
    out = model(ids, torch.arange(length)[None], mask)
    if not last:
        dist.send(out, parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
        return None
    parts = [torch.empty_like(out) for _ in range(TENSOR)]
    dist.all_gather(parts, out.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[..., : config.vocab_size]


@torch.no_grad()
def work(rank: int, jobs: list[tuple[Path, Path, str]], store: str) -> None:
    torch.set_num_threads(1)
    pretend_that_the_cpu_is_a_gpu()
    world = TENSOR * PIPELINE
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
    for model_dir, out, layout in jobs:
        write(model_dir, out, layout)
        dist.barrier()
    dist.destroy_process_group()


def write(model_dir: Path, out: Path, layout: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = make_megatron(hf.config).eval()
    rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    made = values(hf, hf.config, stage * hf.config.num_hidden_layers // PIPELINE, rank)
    for name, parameter in model.named_parameters():
        assert parameter.shape == made[name].shape, (name, parameter.shape, made[name].shape)
        parameter.copy_(made[name])
    logits = forward(model, hf.config)
    if logits is not None and rank == 0:
        torch.save(logits, out.parent / "logits.pt")
    dist_checkpointing.save(model.sharded_state_dict(metadata=METADATA[layout]), str(out))


if __name__ == "__main__":
    words = sys.argv[1:]
    todo = [(Path(m), Path(o), k) for m, o, k in zip(*(words[i::3] for i in range(3)), strict=True)]
    for _, target, _ in todo:
        target.mkdir(parents=True)
    rendezvous = str(todo[0][1].parent / f"rendezvous-{os.getpid()}")
    mp.spawn(work, (todo, rendezvous), TENSOR * PIPELINE)  # type: ignore[attr-defined]
