"""`trireme algorithms`: each algorithm with its parts, and what else each part may be."""

from __future__ import annotations

from trireme.cli.listing import first_line, print_table


def algorithms() -> int:
    """Print two tables; returns the exit code."""
    from trireme.algorithms import names

    rows = []
    for name in names.ALGORITHMS.names():
        recipe = names.ALGORITHMS.get(name)
        parts = (recipe.advantage_fn or "none", recipe.policy_loss_fn, recipe.kl_loss_fn,
                 recipe.entropy_loss_fn, recipe.loss_agg_mode)  # fmt: skip
        rows.append((name, *parts))
    print_table(
        ("algorithm_type", "advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn",
         "loss_agg_mode"),
        rows,
    )  # fmt: skip
    registries = (
        names.ADVANTAGES,
        names.POLICY_LOSSES,
        names.KLS,
        names.ENTROPIES,
        names.SAMPLES,
    )
    print_table(
        ("key", "name", "what it is"),
        [
            (registry.name.removeprefix("algorithm."), name, first_line(registry.get(name)))
            for registry in registries
            for name in registry.names()
        ],
    )
    return 0
