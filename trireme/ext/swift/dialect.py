"""Swift dialect: what plug-ins for ms-swift import is found, where ms-swift is not installed."""

from __future__ import annotations

from trireme.config.dialect import Dialect


class Swift(Dialect):
    """ms-swift's dialect, whose keys are flags: cli/flags.py."""

    def stand_in(self) -> None:
        """Let `import swift` find Trireme's names."""
        from trireme.ext.swift.imports import stand_in

        stand_in()
