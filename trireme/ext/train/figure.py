"""Figure: draws curves of a run as SVG, for notebooks and files.

A page that shows it may be light or dark, and often does not tell it which: all colours are seen on
both.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 14, 40
COLOURS = ("#2298a8", "#d06a2c", "#8a70c8", "#5a9a3c")
INK = "#808890"
MOST_PARTS = 150
"""Parts of a long curve that are drawn, each by its lowest and its highest point."""


@dataclass(frozen=True)
class Figure:
    """A chart of curves over steps; a notebook shows it, as an image."""

    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)


def figure_of(curves: Mapping[str, Points]) -> Figure:
    """Draw curves, each a name and its points (step, value). Raises ValueError without a point."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError(f"there is nothing to plot of {', '.join(curves) or 'no metric'}")
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    low = min(low, 0.0) if high <= 1.0 and low >= 0.0 else low
    high = high if high > low else low + 1.0
    ticks = list(_ticks(low, high))
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    top = TOP + 16 * len(curves)  # the names stand above the curves
    height = top + HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1.0)
        up = (y - low) / (high - low)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(height - BOTTOM - up * (HEIGHT - BOTTOM), 1),
        )

    parts = []
    for value in ticks:
        _, y = place(first, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.6g}</text>')
    steps = [step for step in _ticks(first, last) if first <= step <= last and step % 1 == 0]
    for step in steps if len(steps) > 1 else sorted({first, last}):
        x, _ = place(step, low)
        parts.append(f'<text x="{x}" y="{height - 22}" text-anchor="middle">{step:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 5}" text-anchor="middle">step</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in _thinned(curve)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        dots = [place(*point) for point in curve] if len(curve) <= 12 else []
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(
            f'<text x="{LEFT}" y="{TOP + 16 * number}" fill="{colour}">{html.escape(name)}</text>'
        )
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}'
    return Figure(f'{head} width="{WIDTH}" role="img">{"".join(parts)}</svg>')


def _ticks(low: float, high: float) -> Iterator[float]:
    """Yield some round numbers, the first at or below `low`, the last at or above `high`."""
    rough = ((high - low) or 1.0) / 4
    power = 10 ** math.floor(math.log10(rough))
    each = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)
    nth = math.floor(low / each + 1e-9)
    while True:
        yield float(f"{nth * each:.10g}")
        if nth * each >= high - 1e-9 * each:
            return
        nth += 1


def _thinned(curve: Points) -> Points:
    """Return a curve, or of a long one the lowest and the highest point of each part."""
    if len(curve) <= 2 * MOST_PARTS:
        return curve
    size = math.ceil(len(curve) / MOST_PARTS)
    points = []
    for first in range(0, len(curve), size):
        part = curve[first : first + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        points += sorted(ends)
    return points
