"""Follow: what every trainer rank but the first does: the same as rank 0, when it is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trireme.algorithms.recipes import Recipe
from trireme.serialize import decode
from trireme.trainer.fsdp2 import Fsdp2Backend
from trireme.trainer.heartbeat import Heartbeat
from trireme.trainer.learning import Learning
from trireme.trainer.orders import STOP, await_order, report_failure
from trireme.trainer.ranks import Place, Ranks
from trireme.trainer.step import train_step


def follow(
    place: Place,
    make_backend: Callable[[Ranks], Fsdp2Backend],
    recipe: Recipe,
    make_learning: Callable[[Ranks], Learning] | None = None,
) -> None:
    """Be one rank until rank 0 says stop. Raises what went wrong here, having told rank 0.

    The process ends where rank 0 does not live any more. `make_learning`, where there is a critic.
    """
    ranks = Ranks(place)
    heartbeat = Heartbeat(place)
    try:
        backend = make_backend(ranks)
        learning = make_learning(ranks) if make_learning else Learning(recipe)
        number = 1
        while (order := await_order(ranks, number))["what"] != STOP:
            perform(backend, recipe, learning, order)
            number += 1
        ranks.store.set(f"bye/{ranks.rank}", "")
    except BaseException as error:
        report_failure(ranks, error)
        raise
    finally:
        heartbeat.close()
        ranks.close()


def perform(
    backend: Fsdp2Backend, recipe: Recipe, learning: Learning, order: dict[str, Any]
) -> None:
    """This rank's part of an order."""
    size, options = order["size"], order["options"]
    data = backend.ranks.broadcast(None, size) if size else b""
    if "learning" in options:
        learning.load_state(options["learning"])
        options["learning"] = learning
    known: dict[str, Callable[..., Any]] = {
        "train_step": partial(train_step, backend, recipe, decode(data) if data else []),
        "score": backend.score,
        "save": lambda actor, hf: backend.save(Path(actor), hf=hf),
        "load": lambda actor: backend.load(Path(actor)),
        "save_critic": lambda folder: learning.save_critic(backend, Path(folder)),
        "load_critic": lambda folder: learning.load_critic(backend, Path(folder)),
        "each_weight": lambda: all(True for _ in backend.each_weight()),
    }
    known[order["what"]](**options)
