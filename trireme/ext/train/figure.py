"""Figure: draws curves of a run as SVG, for notebooks and files."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 14, 30
COLOURS = ("#15808f", "#c2571a", "#6b4fa0", "#3f7d20")


@dataclass(frozen=True)
class Figure:
    """A chart of curves over steps; a notebook shows it."""

    svg: str

    def _repr_html_(self) -> str:
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
    for value in (low, (low + high) / 2, high):
        _, y = place(first, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    for step in (first, last):
        x, _ = place(step, low)
        parts.append(f'<text x="{x}" y="{height - 12}" text-anchor="middle">{step:g}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        dots = [place(*point) for point in curve] if len(curve) <= 12 else []
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(
            f'<text x="{LEFT}" y="{TOP + 16 * number}" fill="{colour}">{html.escape(name)}</text>'
        )
    style = 'font-family="sans-serif" font-size="12" fill="currentColor"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}'
    return Figure(f'{head} width="{WIDTH}" role="img">{"".join(parts)}</svg>')
