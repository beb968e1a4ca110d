"""LoRA adapters: merged as peft merges them, and sent over a real gloo group."""

from __future__ import annotations

import asyncio
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.limits import HANG_S
from tests.tiny import make_model
from trireme.engines.weights import fingerprint
from trireme.ext.remote.weight_group import BucketEntry
from trireme.ext.rollout_server.announced import AnnouncedWeights, base_weights, merge_adapter


def adapted(folder: Path, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A peft model with a random adapter, and the adapter's tensors."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    tensors = {n: torch.randn_like(t) for n, t in get_peft_model_state_dict(model).items()}
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, tensors)
    return model, tensors


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged_as_peft_does(tmp_path: Path, rslora: bool) -> None:
    folder = make_model(tmp_path / "model")
    model, tensors = adapted(folder, use_rslora=rslora)
    merged = merge_adapter(
        base_weights(str(folder)), tensors, {"r": 4, "lora_alpha": 8, "use_rslora": rslora}
    )
    whole = model.merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, whole[name], atol=1e-6, rtol=1e-6)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base = base_weights(str(make_model(tmp_path / "model")))
    config = {"r": 1, "lora_alpha": 1}
    name = "base_model.model.model.layers.7.self_attn.q_proj"
    other = {f"{name}.lora_A.weight": torch.ones(1, 2), f"{name}.lora_B.weight": torch.ones(2, 1)}
    with pytest.raises(ValueError, match=r"layers\.7\.self_attn\.q_proj\.weight"):
        merge_adapter(base, other, config)
    with pytest.raises(ValueError, match="DoRA"):
        merge_adapter(base, {}, config | {"use_dora": True})


class Engine:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    async def update_weights(self, source: Any, version: int) -> None:
        self.weights = source

    def health(self) -> Any:
        class Health:
            version = 0

        return Health


@pytest.mark.parametrize("start", [True, "pissa_niter_4"])
def test_an_adapter_comes_over_the_group_and_belongs_to_the_last_full_weights(
    tmp_path: Path, start: Any
) -> None:
    folder = make_model(tmp_path / "model")
    _, tensors = adapted(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts, at = [], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 4
        parts.append(BucketEntry(name, "float32", list(tensor.shape), at, at + size))
        at += size
    bucket = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])

    def trainer() -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

        store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=HANG_S))
        group: Any = ProcessGroupGloo(store, 1, 2, timedelta(seconds=HANG_S))
        group.broadcast(bucket, 1).wait()

    async def serve() -> dict[str, torch.Tensor]:
        engine: Any = Engine()
        weights = AnnouncedWeights(engine, model_path=str(folder), timeout=HANG_S)
        await weights.join("127.0.0.1", port)
        thread = threading.Thread(target=trainer, daemon=True)
        thread.start()
        config = {"r": 4, "lora_alpha": 8, "init_lora_weights": start}
        await weights.receive_bucket(parts, config)
        try:
            await weights.ready()
        finally:
            thread.join(HANG_S)
        return engine.weights

    if start is not True:  # it belongs to the residual that only the trainer has
        with pytest.raises(ValueError, match=r"init_lora_weights='pissa_niter_4'.* full weights"):
            asyncio.run(serve())
        return
    got = asyncio.run(serve())
    expected = merge_adapter(
        load_file(folder / "model.safetensors"), tensors, {"r": 4, "lora_alpha": 8}
    )
    assert fingerprint(got, "float32") == fingerprint(expected, "float32")
