"""Heartbeat: a thread that tells a database again and again that this process is alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from trireme.log import get_logger

logger = get_logger("queue_experience_buffer")


class Heartbeat:
    """Calls `beat` every `interval` seconds until `stop`; ends with the process.

    A beat that fails is logged and tried again: whoever then counts as silent is told so when it
    commits.
    """

    def __init__(self, beat: Callable[[], None], interval: float) -> None:
        self._beat = beat
        self._interval = interval
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """No more beats."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._beat()
            except SQLAlchemyError as error:
                logger.warning("the buffer's database did not hear our heartbeat: %s", error)
