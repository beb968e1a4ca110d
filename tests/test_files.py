"""Files: what disks refuse, and what of it ends a run."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from trireme.buffer.lines import LineFile
from trireme.files import CannotWrite, write_text
from trireme.monitor.monitor import JsonLinesMonitor


@pytest.mark.parametrize(
    ("number", "ends"),
    [
        *((n, False) for n in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)),
        *((n, True) for n in (errno.EIO, errno.ENOSPC)),
    ],
)
def test_a_disk_that_cannot_sync_folders_is_none_that_has_failed(
    number: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems of clouds refuse it, each with a number of its own."""

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    path = tmp_path / "state.json"
    if not ends:
        write_text(path, "{}")
        assert path.read_text() == "{}"
        return
    with pytest.raises(CannotWrite, match=f"cannot write .*state.json: {os.strerror(number)}"):
        write_text(path, "{}")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_a_part_of_a_line_has_failed(tmp_path: Path) -> None:
    """An almost full disk does, as a file near the limit of its size: `write` raises nothing."""
    lines, monitor = LineFile(tmp_path / "lines.jsonl"), JsonLinesMonitor(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CannotWrite, match=f"cannot write {tmp_path}/lines.jsonl: "):
            lines.append([{"eid": "1/0/0/0", "step": 1, "text": "long" * 30}])
        with pytest.raises(CannotWrite, match=f"cannot write {tmp_path}/metrics.jsonl: "):
            monitor.log({f"metric {n}": 0.5 for n in range(10)}, 1, "trainer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
