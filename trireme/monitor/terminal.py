"""Terminal: rich's console, on which the words of others command nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trireme.text import shown


class Terminal(Console):
    """Prints texts as `shown`; its own colours and cursor movements are no texts."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            if not segment.control and (text := shown(segment.text)) != segment.text:
                segment = Segment(text, segment.style)
            yield segment
