"""Randomness: the state of the generators that training draws from, dropout's for one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The CPU's, and the device's own where it has one."""
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Back to where `state` was taken; on another kind of device, what it knows of it."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
