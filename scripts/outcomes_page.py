"""Outcomes page: the table in docs/examples.md of what learned, from the runs' own records.

`python scripts/outcomes_page.py` writes the table and a picture for each row, of the rows in
`examples/*/results.jsonl`; a test checks that both are up to date. A training is in the table if
every seed's held-out reward rose by at least 0.1.
"""

from __future__ import annotations

import json
import runpy
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "examples.md"
PICTURES = ROOT / "docs" / "images" / "learned"
BEGINS, ENDS = "<!-- outcomes: scripts/outcomes_page.py -->", "<!-- outcomes end -->"
RISE = 0.1
WIDTH, HEIGHT, EDGE = 150, 56, 4
COLOURS = ("#15808f", "#c2571a", "#6b4fa0")
LEARNS = {
    "words": "a word described in exactly six words (SmolLM2-135M)",
    "words_cool": "the same, sampled at temperature 0.7",
    "words_lora": "the same, with LoRA",
    "words_rloo": "the same, by RLOO",
    "words_gspo": "the same, by GSPO",
    "words_dr_grpo": "the same, by Dr. GRPO",
    "words_async": "the same, asynchronously",
    "words_replay": "the same, asynchronously, each group trained twice at most",
    "calculator": "multiplication with a calculator, over several turns",
    "second_try": "six words, with a second attempt after a hint",
    "guess": "one of seven numbers guessed in three tries (an agent of OpenAI's SDK)",
    "dpo": "six words, from pairs (DPO)",
    "kto": "six words, from replies with a label (KTO)",
    "distill": "six words, from the model of `words` as teacher",
    "qwen3_vl": "colours and numbers in pictures (a tiny Qwen3-VL)",
    "qwen2_5_vl": "the same, with a tiny Qwen2.5-VL",
    "qwen3_5": "the same, with a tiny Qwen3.5",
    "gemma3": "the same, with a tiny Gemma 3",
}
"""A training's name -> what its model learns; one that is not here is named as it is."""

Rows = Sequence[Mapping[str, Any]]


def trainings() -> dict[str, list[dict[str, Any]]]:
    """The recorded rows by the name of their training, seeds in order."""
    out: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(ROOT.glob("examples/*/results.jsonl"), reverse=True):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            out[row["name"]].append({**row, "folder": file.parent.name})
    return {name: sorted(rows, key=lambda row: row["seed"]) for name, rows in out.items()}


def learned(rows: Rows) -> bool:
    """Return True if every seed's held-out reward rose."""
    return all(row["after"] - (row["before"] or 0.0) >= RISE for row in rows)


def command(row: Mapping[str, Any]) -> str:
    """The command of a row, as its reader types it."""
    if row["folder"] == "smollm2":
        gallery = runpy.run_path(str(ROOT / "examples/smollm2/gallery.py"))
        return shlex.join(["trireme", *gallery["command"](row["name"], row["seed"])])
    model = f"checkpoints/pictures_data/{row['name']}"
    run = f"trireme run examples/pictures/pictures.yaml seed={row['seed']}"
    given = "" if row["name"] == "qwen3_vl" else f"TRIREME_MODEL_PATH={model} "
    named = "" if row["name"] == "qwen3_vl" else f" name={row['name']}_{row['seed']}"
    return f"{given}{run}{named}"


def picture(rows: Rows) -> str:
    """The held-out rewards by step, a line for each seed, from 0 to 1."""
    last = max(step for row in rows for step, _ in row["held_out"])
    lines = []
    for number, row in enumerate(rows):
        points = " ".join(
            f"{EDGE + step / max(last, 1) * (WIDTH - 2 * EDGE):.1f},"
            f"{HEIGHT - EDGE - value * (HEIGHT - 2 * EDGE):.1f}"
            for step, value in row["held_out"]
        )
        colour = COLOURS[number % len(COLOURS)]
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    base = f'<path d="M0 {HEIGHT - EDGE}H{WIDTH}M0 {EDGE}H{WIDTH}" stroke="#8884"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'{head} width="{WIDTH}" height="{HEIGHT}">{base}{"".join(lines)}</svg>\n'


def table() -> str:
    """The table, and a line on the trainings that are not in it."""
    lines = [
        "| held-out reward | learns | before | after, seed by seed | processor minutes | command |",
        "|-|-|-|-|-|-|",
    ]
    others = []
    for name, rows in trainings().items():
        if not learned(rows):
            others.append(f"`{name}`")
            continue
        after = ", ".join(f"{row['after']:.2f}" for row in rows)
        minutes = sorted(round(row["cpu_s"] / 60) for row in rows if "cpu_s" in row)
        took = (
            "-" if not minutes else f"{minutes[0]}" + f" to {minutes[-1]}" * (len(set(minutes)) > 1)
        )
        what = LEARNS.get(name, name)
        cells = (f"![{name}](images/learned/{name}.svg)", what, f"{rows[0]['before'] or 0:.2f}")
        lines.append("| " + " | ".join((*cells, after, took, f"`{command(rows[0])}`")) + " |")
    text = f"\n\nRecorded, too, and without such a rise: {', '.join(others)}." if others else ""
    return "\n".join(lines) + text


def written() -> dict[Path, str]:
    """Every file that the script writes, with its text."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    files = {PAGE: f"{before}{BEGINS}\n\n{table()}\n\n{ENDS}{after}"}
    for name, rows in trainings().items():
        if learned(rows):
            files[PICTURES / f"{name}.svg"] = picture(rows)
    return files


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
