"""Pictures: draws measured curves and a console's text as SVG, for the documentation.

    python scripts/pictures.py curves OUT.svg LABEL=RUN_FOLDER ...   # held-out accuracy and reward
    python scripts/pictures.py curves OUT.svg "seed 0=examples/smollm2/results.jsonl:words:0" ...
    python scripts/pictures.py console OUT.svg LOG.txt                # a console, line after line
    python scripts/pictures.py badges docs/images/badges.svg          # of pyproject.toml

The curves are read from `monitor/metrics.jsonl` of each folder, or from the row of a training and
seed in the gallery's results. A console's lines light up at an even pace: the picture shows what is
printed, and not when.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trireme import __version__
from trireme.files import read_jsonl, write_text

ROOT = Path(__file__).resolve().parents[1]

_COLORS = (
    ("#3b55d9", "#93a1ff"),
    ("#c0561a", "#f0a267"),
    ("#1e8a5a", "#63c795"),
    ("#a3339b", "#e58fdf"),
    ("#8a6d00", "#d6b84a"),
    ("#0b7c93", "#5fc6da"),
    ("#b3263e", "#f08c9d"),
    ("#5b6470", "#a9b3c1"),
    ("#5a3fb0", "#b7a1f5"),
)
_MOST_REWARDS = 3
"""With more runs than that the rewards of training steps are left out."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _SPAN_X, _SPAN_Y = 860, 380, 60, 30, 640, 290
_EVALUATION, _REWARD = "eval/held_out/reward/mean@1", "rollout/reward/mean"
_LINE, _PACE = 19, 0.2


def series(folder: Path, metric: str) -> list[tuple[int, float]]:
    """A metric of a run, as (step, value)."""
    file, _, row = str(folder).partition(":")
    if row:
        name, _, seed = row.partition(":")
        found = [r for r in read_jsonl(Path(file)) if (r["name"], r["seed"]) == (name, int(seed))]
        return [(n, x) for n, x in found[-1]["held_out" if metric == _EVALUATION else "sampled"]]
    lines = (folder / "monitor" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["metrics"][metric]) for row in rows if metric in row["metrics"]]


def smoothed(points: Sequence[tuple[int, float]], half: int = 4) -> list[tuple[int, float]]:
    """Each value as the mean of its neighbours."""
    out = []
    for at, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, at - half) : at + half + 1]]
        out.append((step, sum(near) / len(near)))
    return out


def curves(runs: Sequence[tuple[str, Path]]) -> str:
    """Evaluations as marks on a line, rewards of training steps (mean of nine) as a thin line."""
    last = max(step for _, folder in runs for step, _ in series(folder, _EVALUATION))

    def place(point: tuple[int, float]) -> str:
        x, y = _LEFT + _SPAN_X * point[0] / last, _TOP + _SPAN_Y * (1 - point[1])
        return f"{x:.1f} {y:.1f}"

    light = "".join(f".s{i}{{stroke:{a}}} .d{i}{{fill:{a}}}" for i, (a, _) in enumerate(_COLORS))
    dark = "".join(f".s{i}{{stroke:{b}}} .d{i}{{fill:{b}}}" for i, (_, b) in enumerate(_COLORS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="Held-out accuracy and training reward by step">',
        "<style>text{font:13px system-ui,sans-serif;fill:#333c54}.g{stroke:#d5d9e5}.b{fill:#fff}"
        f"path{{fill:none;stroke-width:2.2}}.r{{stroke-width:1;opacity:.55}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#c3c9dc}.g{stroke:#353c52}.b{fill:#141824}"
        f"{dark}}}</style>",
        f'<rect class="b" width="{_WIDTH}" height="{_HEIGHT}" rx="10"/>',
    ]
    for tenth in range(0, 11, 2):
        y = _TOP + _SPAN_Y * (1 - tenth / 10)
        parts.append(f'<path class="g" d="M{_LEFT} {y}H{_LEFT + _SPAN_X}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tenth * 10} %</text>')
    for step in range(0, last + 1, max(1, last // 6)):
        x = _LEFT + _SPAN_X * step / last
        parts.append(f'<text x="{x}" y="{_TOP + _SPAN_Y + 22}" text-anchor="middle">{step}</text>')
    middle, below = _LEFT + _SPAN_X / 2, _HEIGHT - 12
    parts.append(f'<text x="{middle}" y="{below}" text-anchor="middle">train step</text>')
    for i, (label, folder) in enumerate(runs):
        color = i % len(_COLORS)
        evaluations = series(folder, _EVALUATION)
        rewards = smoothed(series(folder, _REWARD)) if len(runs) <= _MOST_REWARDS else []
        if rewards:
            parts.append(f'<path class="r s{color}" d="M{"L".join(map(place, rewards))}"/>')
        parts.append(f'<path class="s{color}" d="M{"L".join(map(place, evaluations))}"/>')
        for point in evaluations:
            x, y = place(point).split()
            parts.append(f'<circle class="d{color}" cx="{x}" cy="{y}" r="4"/>')
        x, y = _LEFT + _SPAN_X + 22, _TOP + 24 + 24 * i
        end = f"{evaluations[-1][1]:.1%}"
        parts.append(f'<circle class="d{color}" cx="{x}" cy="{y - 4}" r="5"/>')
        parts.append(f'<text x="{x + 12}" y="{y}">{escape(label)}: {end}</text>')
    x, y = _LEFT + _SPAN_X + 12, _TOP + 60 + 24 * len(runs)
    legend = ["marks: held out", "thin: training,", "mean of 9 steps"]
    for i, line in enumerate(legend if len(runs) <= _MOST_REWARDS else legend[:1]):
        parts.append(f'<text x="{x}" y="{y + 18 * i}">{line}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def console(text: str) -> str:
    """A console's window; its lines light up one after the other."""
    lines = text.rstrip("\n").splitlines()
    width = max(map(len, lines)) * 8.1 + 40
    height = len(lines) * _LINE + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="The console of a run">',
        "<style>text{font:13.5px ui-monospace,monospace;fill:#dfe4f2;white-space:pre;"
        "animation:a .01s both}.c{fill:#8fd694}@keyframes a{from{opacity:.25}to{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){text{animation:none}}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="10" fill="#171b28"/>',
        *(f'<circle cx="{20 + 18 * i}" cy="20" r="6" fill="#3b435c"/>' for i in range(3)),
    ]
    for i, line in enumerate(lines):
        kind = ' class="c"' if line.startswith("$") else ""
        style = f'style="animation-delay:{i * _PACE:.2f}s"'
        y = 56 + i * _LINE
        parts.append(
            f'<text{kind} {style} x="20" y="{y}" xml:space="preserve">{escape(line)}</text>'
        )
    return "\n".join(parts) + "\n</svg>\n"


def badges() -> str:
    """The version, the versions of Python and the licence, as labels in a row."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = [text.rpartition(" :: ")[2] for text in project["classifiers"]]
    pythons = [text for text in known if re.fullmatch(r"3\.\d+", text)]
    labels = {
        "version": __version__,
        "python": f"{pythons[0]} - {pythons[-1]}",
        "licence": project["license"],
        "types": "included",
    }
    spoken = ", ".join(f"{name} {text}" for name, text in labels.items())
    parts, x = [], 0.0
    for name, text in labels.items():
        left, right = 6.6 * len(name) + 12, 6.6 * len(text) + 12
        parts += [
            f'<rect x="{x:.1f}" width="{left + right:.1f}" height="20" rx="4" fill="#4a545c"/>',
            f'<path transform="translate({x + left:.1f})" fill="#15697a" '
            f'd="M0 0h{right - 4:.1f}a4 4 0 0 1 4 4v12a4 4 0 0 1-4 4H0z"/>',
            f'<text x="{x + 6:.1f}" y="14">{name}</text>',
            f'<text x="{x + left + 6:.1f}" y="14">{escape(text)}</text>',
        ]
        x += left + right + 6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - 6:.0f}" height="20" role="img" '
        f'aria-label="{escape(spoken)}" fill="#fff" font-family="ui-monospace,monospace" '
        'font-size="11">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main(words: Sequence[str]) -> None:
    """See the module."""
    kind, out, *rest = words
    if kind == "curves":
        runs = [(label, Path(folder)) for label, _, folder in (w.partition("=") for w in rest)]
        write_text(Path(out), curves(runs))
    elif kind == "console":
        write_text(Path(out), console(Path(rest[0]).read_text(encoding="utf-8")))
    elif kind == "badges":
        write_text(Path(out), badges())
    else:
        raise SystemExit(f"'{kind}' is no picture: expected curves, console or badges")


if __name__ == "__main__":
    main(sys.argv[1:])
