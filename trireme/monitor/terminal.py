"""Terminal: rich's console, on which foreign text cannot issue terminal commands."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trireme.text import shown


class Terminal(Console):
    """Prints texts as `shown`; rich's own colours and cursor movements pass through."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Implement rich's `Console.render`."""
        for segment in super().render(renderable, options):
            if not segment.control and (text := shown(segment.text)) != segment.text:
                segment = Segment(text, segment.style)
            yield segment
