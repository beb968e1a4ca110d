"""Memory page: the table in docs/scale.md of what a trainer's rank needs of a GPU.

`python scripts/memory_page.py` writes it between the page's two marks; a test holds that it was
done.
"""

from __future__ import annotations

from pathlib import Path

from trireme.config.memory import GIB, ModelShape, Use, memory_of

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- table: scripts/memory_page.py -->", "<!-- end of the table -->"
TOKENS, RANKS = 16384, (1, 4, 8, 16)
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


def document() -> str:
    """The page with its table written anew."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
