"""The pictures of a run as files: once each, within a limit, whatever else lies in the folder."""

from __future__ import annotations

import hashlib
import sqlite3
from functools import partial
from pathlib import Path

from tests.buffer.made import experience
from trireme.buffer.blocks import BLOCKS, stored_experiences
from trireme.buffer.picture_files import FOLDER, PictureFiles, picture_bytes, picture_file
from trireme.buffer.record import Record
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


def test_two_copies_that_trim_one_folder_lose_no_picture_that_is_shown_again(
    tmp_path: Path,
) -> None:
    one, other = PictureFiles(tmp_path), PictureFiles(tmp_path, limit=450)
    one.add([made(0)])
    other.add(made(n) for n in range(1, 6))
    assert picture_file(tmp_path, made(0).digest) is None
    one.add([made(0)])
    assert picture_bytes(tmp_path, made(0).digest) == made(0).data
    limited = PictureFiles(tmp_path, limit=450)
    limited.add([made(1)])  # it has read the folder
    other.add(made(n) for n in range(6, 9))
    limited.add(made(n) for n in range(9, 12))  # the files of `other` are the oldest
    assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) <= 500


def test_a_picture_that_another_copy_removes_meanwhile_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / made(0).digest).symlink_to(tmp_path / "gone")  # listed, and not there
    PictureFiles(tmp_path).add([made(1)])
    assert picture_bytes(tmp_path, made(1).digest) == made(1).data


def test_a_copy_in_a_database_has_its_pictures_in_files(tmp_path: Path) -> None:
    data = bytes(50_000)
    seen = Picture(data, hashlib.sha256(data).hexdigest(), 2, (1, 2, 4))
    record = Record(database=f"sqlite:///{tmp_path / 'copy.db'}")
    shown = [experience(1, 0, run, 1.0, pictures=(seen,)) for run in range(4)]
    record._write(shown)
    record.close()
    with sqlite3.connect(tmp_path / "copy.db") as database:
        (size,) = database.execute(f"SELECT sum(length(data)) FROM {BLOCKS}").fetchone()
        assert size < 10_000 and len([*(tmp_path / FOLDER).iterdir()]) == 1
        again = list(stored_experiences(database, partial(picture_bytes, tmp_path)))
    assert len(again) == 4 and all(e.pictures == (seen,) for e in again)
    assert picture_bytes(tmp_path, "0" * 64) == b""
