"""`trireme algorithms`: each algorithm with its parts, and what each part may be, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.cli.listing import first_line, plugins_loaded, print_table


def algorithms(plugin_dirs: Sequence[Path] = ()) -> int:
    """Print three tables; returns the exit code."""
    from trireme.algorithms import names
    from trireme.algorithms.recipes import Recipe

    if not plugins_loaded(plugin_dirs):
        return 2
    rows, uses = [], []
    for name in names.ALGORITHMS.names():
        recipe = names.ALGORITHMS.get(name)
        if not isinstance(recipe, Recipe):
            continue  # a path that names something else: refused where it is used
        needs = [
            word
            for word, needed in (
                ("critic", recipe.needs_critic),
                ("reference", recipe.needs_reference),
                ("data set", recipe.from_data),
            )
            if needed
        ]
        parts = (recipe.advantage_fn or "none", recipe.policy_loss_fn, recipe.kl_loss_fn,
                 recipe.entropy_loss_fn, recipe.loss_agg_mode, ", ".join(needs))  # fmt: skip
        rows.append((name, *parts))
        uses.append((name, recipe.use))
    print_table(
        ("algorithm_type", "advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn",
         "loss_agg_mode", "needs"),
        rows,
    )  # fmt: skip
    print_table(("algorithm_type", "when to use it"), uses)
    registries = (
        names.ADVANTAGES,
        names.POLICY_LOSSES,
        names.KLS,
        names.ENTROPIES,
        names.SAMPLES,
    )
    print_table(
        ("key", "name", "formula"),
        [
            (registry.name.removeprefix("algorithm."), name, first_line(registry.get(name)))
            for registry in registries
            for name in registry.names()
        ],
    )
    return 0
