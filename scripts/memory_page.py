"""Memory page: the tables in docs/gpus.md of what a trainer's rank needs of a GPU, alone or with
an engine.

`python scripts/memory_page.py` writes them between the page's marks; a test checks
that it is up to date.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trireme.config.memory import GIB
from trireme.config.shape import ModelShape
from trireme.ext.memory.estimate import Use, engine_share, memory_of

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"
BEGIN, END = "<!-- table: scripts/memory_page.py -->", "<!-- end of the table -->"
COLOCATED = "<!-- table of mode colocate: scripts/memory_page.py -->"
TOKENS, RANKS = 16384, (1, 4, 8, 16)
SHARED, CARD = (1, 4, 8), 80 * GIB
# Qwen2.5's: layers, hidden, intermediate, width of queries and of keys, vocabulary
SIZES = {
    "1.5B": (28, 1536, 8960, 1536, 256, 151936, True, True),
    "7B": (28, 3584, 18944, 3584, 512, 152064, False, True),
    "14B": (48, 5120, 13824, 5120, 1024, 152064, False, True),
    "32B": (64, 5120, 27648, 5120, 1024, 152064, False, True),
}


def table() -> str:
    """A row for each size, a column for each number of ranks."""
    lines = [
        "| | weights | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |",
        "|-|-|" + "-|" * len(RANKS),
    ]
    for name, sizes in SIZES.items():
        shape = ModelShape(*sizes)
        cells = [f"{name} | {shape.weights / 1e9:.2f} billion"]
        for ranks in RANKS:
            both = []
            for checkpointing in (True, False):
                use = Use(ranks, TOKENS, half=True, device="cuda", checkpointing=checkpointing)
                use = Use(**{**vars(use), "reference": True})
                both.append(f"{sum(memory_of(shape, use).values()) / GIB:.0f}")
            cells.append(" / ".join(both))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def colocated() -> str:
    """A row for each size, a column for each number of GPUs that rank and engine share."""
    lines = [
        "| | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in SHARED) + " |",
        "|-|" + "-|" * len(SHARED),
    ]
    for name, sizes in list(SIZES.items())[:3]:
        cells = [name]
        for ranks in SHARED:
            both = [_in_turns(ModelShape(*sizes), ranks, parks) for parks in (False, True)]
            cells.append("; ".join(dict.fromkeys(both)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _in_turns(shape: ModelShape, ranks: int, parks: bool) -> str:
    """GiB of a rank and its engine at most, and the engine's share; or why they do not fit."""
    use = Use(ranks, TOKENS, half=True, device="cuda", checkpointing=True, reference=True)
    use = replace(use, engine_sleeps=True, parks=parks)
    share = engine_share(shape, use, CARD)
    use = replace(use, engine=int(share * CARD))
    needed = sum(memory_of(shape, use).values())
    fits = needed <= CARD and 2 * shape.weights + GIB <= share * CARD
    return f"{needed / GIB:.0f} ({share:.2f})" if fits else f"no: {needed / GIB:.0f}"


def document() -> str:
    """The page with its tables written anew."""
    page = PAGE.read_text(encoding="utf-8")
    for begin, made in ((BEGIN, table()), (COLOCATED, colocated())):
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(END)
        page = f"{head}{begin}\n\n{made}\n\n{END}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
