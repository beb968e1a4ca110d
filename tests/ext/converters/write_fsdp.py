"""Writes FSDP2 shards of a Hugging Face model as trainers of several ranks save them: gloo, CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def write_fsdp(model_dir: Path, actor: Path, mesh: tuple[int, ...], *, plain: bool = False) -> Path:
    """`actor/model_world_size_W_rank_R.pt` for a mesh of one or two dimensions (copies by shards).

    `plain`: the ranks' local tensors alone, without what DTensors say of them.
    """
    actor.mkdir(parents=True)
    world = int(torch.tensor(mesh).prod())
    # forked, so that no rank imports transformers anew
    mp.start_processes(  # type: ignore[attr-defined]
        _work, (world, mesh, model_dir, actor, plain), world, start_method="fork"
    )
    (actor / "rendezvous").unlink(missing_ok=True)
    return actor


def _work(
    rank: int, world: int, shape: tuple[int, ...], model_dir: Path, actor: Path, plain: bool
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    store = f"file://{actor / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    if plain:
        state = {name: tensor.to_local().clone() for name, tensor in state.items()}
    torch.save(state, actor / f"model_world_size_{world}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
