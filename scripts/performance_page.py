"""Performance page: writes the measured part of docs/performance.md, and its picture.

    python scripts/performance_page.py                                # from docs/performance.json
    python scripts/performance_page.py --measure --trl PYTHON --vllm PYTHON    # `make performance`

`--measure` runs the benchmarks, which takes most of an hour on two idle cores, and writes the JSON
after each. `--parts` or `--only` select some of them: the others keep their figures, and each row
names its commit. Text of the page outside the marks stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from trireme.files import write_text

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.json"
PICTURE = ROOT / "docs" / "images" / "cost_curves.svg"
BEGIN, END = "<!-- measured: scripts/performance_page.py -->", "<!-- end of what was measured -->"
PLAIN = ("explorer_overhead", "overlap", "memory", "start_up")
"""Benchmarks whose figures are the lines that they print of their targets."""
PARTS = ("against_peers", "cost_curves", *PLAIN)
AXES = {
    "tasks": "tasks a step",
    "group": "rollouts a task",
    "reply": "tokens a reply",
    "episode": "steps an episode",
    "width": "width of the model",
    "runners": "runners",
}
_WIDE, _HIGH, _PAD, _COLUMNS = 260, 190, 46, 3


def measure(options: argparse.Namespace, found: dict[str, Any], name: str) -> None:
    """Run one benchmark; what it says of its targets, and its figures, go over those of `found`.

    Raises RuntimeError where it fails for another reason than a missed target.
    """
    pythons = (("trl", options.trl), ("vllm", options.vllm))
    named = [f"--{peer}={python}" for peer, python in pythons if python]
    named += ["--only", *options.only] if options.only else []
    named += ["--rounds", str(options.rounds)]
    named += ["--threads", *map(str, options.threads)] if options.threads else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True)
    stamp = {"commit": commit.stdout.decode().strip(), "date": str(date.today())}
    stamp["load"] = f"{os.getloadavg()[1]:.1f}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.json"
        more = [] if name in PLAIN else ["--json", str(file)]
        more += named if name == "against_peers" else []
        more += ["--quick"] if options.quick else []
        print(name, file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = [line for line in done.stdout.splitlines() if ": asked at " in line]
        if done.returncode and not said:
            raise RuntimeError(f"benchmarks/{name}.py failed with {done.returncode}")
        figures = json.loads(file.read_text()) if file.exists() else None
    found |= {"cores": os.cpu_count(), "python": platform.python_version()}
    for line in said:
        target, _, rest = line.partition(": asked ")
        asked, _, reached = rest.partition(", ")
        if reached != "NOT MEASURED":
            reached = reached.removeprefix("reached ")
            found["targets"][target] = {"asked": asked, "reached": reached, **stamp}
    if name == "against_peers":
        for kind, row in (figures or {}).items():
            found[name][kind] = {"row": row, **stamp}
    elif figures is not None:
        found[name] = {"curves": figures, **stamp}


def document(found: dict[str, Any]) -> str:
    """The measured part as Markdown."""
    lines = [
        f"Measured on {found['cores']} cores with Python {found['python']}. `measured` is the "
        "commit, the day, and the load average before the part began.\n",
        "| work | who | threads | median | Trireme / it | of the floor | peak memory | measured |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for kind, one in found["against_peers"].items():
        lines += [_row(kind, name, peer, one) for name, peer in one["row"].items()]
    lines += ["", "| target | asked | reached | measured |", "|-|-|-|-|"]
    for name, one in found["targets"].items():
        lines.append(f"| {name} | {one['asked']} | {one['reached']} | {_when(one)} |")
    if curves := found.get("cost_curves"):
        when = _when(curves)
        lines += ["", f"![Seconds a step over six sizes](images/{PICTURE.name})", f"\n{when}"]
    return "\n".join(lines)


def _when(stamp: dict[str, Any]) -> str:
    return f"`{stamp['commit']}`, {stamp['date']}, {stamp['load']}"


def _row(kind: str, name: str, peer: dict[str, Any], one: dict[str, Any]) -> str:
    row, middle = one["row"], peer["median"]
    rate, ours = kind.startswith("generate") or kind == "accuracy", row["Trireme"]["median"]
    times = ours / middle if rate else middle / ours
    shown = f"{middle:,.0f} tokens/s" if rate else f"{middle:.3g} s a step"
    shown = f"{middle:.1%} right" if kind == "accuracy" else shown
    share = f"{middle / row['floor']['median']:.0%}" if "floor" in row else ""
    memory = f"{peer['peak_mib'] / 1024:.1f} GiB" if peer["peak_mib"] else ""
    columns = kind, name, peer["threads"], shown, f"{times:.2f}", share, memory, _when(one)
    return f"| {' | '.join(map(str, columns))} |"


def picture(curves: dict[str, list[tuple[float, float]]]) -> str:
    """A small panel a curve, both axes from 0."""
    panels = [
        f'<g transform="translate({n % _COLUMNS * _WIDE} {n // _COLUMNS * _HIGH})">'
        f"{_panel(AXES[name], points)}</g>"
        for n, (name, points) in enumerate(curves.items())
    ]
    rows = -(-len(curves) // _COLUMNS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_COLUMNS * _WIDE} {rows * _HIGH}" '
        'font-family="sans-serif" font-size="11" fill="#777">'
        "<style>.l{fill:none;stroke:#3b55d9;stroke-width:2}.p{fill:#3b55d9}.a{stroke:#999}</style>"
        f"{''.join(panels)}</svg>\n"
    )


def _panel(title: str, points: list[tuple[float, float]]) -> str:
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points)
    wide, high = _WIDE - 2 * _PAD, _HIGH - 2 * _PAD

    def place(x: float, y: float) -> tuple[float, float]:
        return _PAD + wide * x / most_x, _PAD + high * (1 - y / most_y)

    at = [place(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(f'<circle class="p" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at)
    numbers = "".join(
        f'<text x="{px:.1f}" y="{_PAD + high + 14}" text-anchor="middle">{x:g}</text>'
        for (x, _), (px, _) in zip(points, at, strict=True)
        if x == most_x or x * 4 >= most_x
    )
    return (
        f'<path class="a" d="M{_PAD} {_PAD}V{_PAD + high}H{_PAD + wide}" fill="none"/>'
        f'<text x="{_PAD - 4}" y="{_PAD + 4}" text-anchor="end">{most_y:.2g} s</text>'
        f'<polyline class="l" points="{line}"/>{marks}{numbers}'
        f'<text x="{_PAD + wide / 2}" y="{_PAD + high + 30}" text-anchor="middle">'
        f"{escape(title)}</text>"
    )


def main() -> int:
    """Write the page's part, and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--quick", action="store_true", help="little work, nothing is written")
    parser.add_argument("--trl", help="Python of an environment that has TRL")
    parser.add_argument("--vllm", help="Python of an environment that has vLLM")
    parser.add_argument("--only", nargs="+", help="workloads of against_peers")
    parser.add_argument("--rounds", type=int, default=3, help="of against_peers")
    parser.add_argument("--threads", type=int, nargs="+", help="those that against_peers tries")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    found = json.loads(DATA.read_text("utf-8"))
    if options.quick:
        found = {"targets": {}, "against_peers": {}}
    for name in options.parts if options.measure else ():
        measure(options, found, name)
        if not options.quick:
            write(found)
    if options.quick:
        print(document(found))
    else:
        write(found)
    return 0


def write(found: dict[str, Any]) -> None:
    """The figures, the page's part of them, and the picture."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(DATA, json.dumps(found, indent=1) + "\n")
    if found.get("cost_curves"):
        write_text(PICTURE, picture(found["cost_curves"]["curves"]))
    write_text(PAGE, f"{before}{BEGIN}\n\n{document(found)}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
