"""Swift dialect: makes the modules that ms-swift's plug-ins import available without ms-swift."""

from __future__ import annotations

from trireme.config.dialect import Dialect


class Swift(Dialect):
    """The dialect of ms-swift, whose keys are flags: cli/flags.py."""

    def stand_in(self) -> None:
        """Let `import swift` find Trireme's names."""
        from trireme.ext.swift.imports import stand_in

        stand_in()
