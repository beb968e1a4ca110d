"""Which worker of pytest-xdist runs which file, where one of them dies.

pytest-xdist 3.8 gives its replacement the files that the dead one had finished, and then waits for
their results without end (pytest-dev/pytest-xdist#1378, #1327); and it runs the test again that
ended the worker. What hides a crash behind a hang is found by nobody.
"""

from __future__ import annotations

from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    """`--dist loadfile` in which a crash costs one test: it fails with its name."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker; returns the test that it died in, if any. Others run what is left."""
        files = self.assigned_work.pop(node)
        left = [(tests, name) for tests in files.values() for name in tests if not tests[name]]
        if not left:
            return None
        tests, crashed = left[0]
        tests[crashed] = True  # it has failed
        self.workqueue |= {
            file: of_file for file, of_file in files.items() if not all(of_file.values())
        }
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        """Give files to workers. A worker begins its last test only when it knows the next, or that
        there is none: one that replaces another is given two files, as the first ones are.
        """
        super().schedule()
        if self.collection:
            for node in self.nodes:
                self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # another one that replaces a worker has not begun
        with suppress(OSError):  # it has just died: `remove_node` follows, and takes its files back
            super()._reschedule(node)
