"""Files: what disks refuse, and what of it ends a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trireme.files import CannotWrite, write_text


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
