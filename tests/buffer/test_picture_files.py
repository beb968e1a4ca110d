"""The pictures of a run as files: once each, within a limit, whatever else lies in the folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trireme.buffer.picture_files import FOLDER, PictureFiles, picture_file
from trireme.pictures import Picture


def made(number: int) -> Picture:
    data = bytes([number]) * 100
    return Picture(data, hashlib.sha256(data).hexdigest(), 2, (1, 2, 4))


def test_the_oldest_go_past_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    files = PictureFiles(tmp_path, limit=450)
    files.add([made(0), made(1), made(1)])
    (folder / "notes.txt").write_text("mine")
    files = PictureFiles(tmp_path, limit=450)  # a resumed run finds what is there
    files.add([made(0)])
    files.add(made(n) for n in range(2, 6))
    left = {path.name for path in folder.iterdir()}
    assert made(5).digest in left and made(0).digest not in left and "notes.txt" in left
    assert sum(len(made(n).data) for n in range(6) if made(n).digest in left) <= 450
    found = picture_file(tmp_path, made(5).digest)
    assert found is not None and found.read_bytes() == made(5).data
    assert picture_file(tmp_path, "notes.txt") is None
