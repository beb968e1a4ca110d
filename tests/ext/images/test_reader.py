"""What pictures are read from, and what each unreadable one is answered with."""

from __future__ import annotations

import base64
import io
import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.ext.images.seeing import make_seeing, picture, png, reader_for
from trireme.config.lookup import model_config
from trireme.ext.images import reader as module
from trireme.ext.images.reader import ImageReader, make_reader
from trireme.pictures import Picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture
def reader(folder: Path) -> ImageReader:
    return reader_for(folder)


def test_all_forms_of_a_picture_are_one(reader: ImageReader, tmp_path: Path) -> None:
    data = png(picture("red"))
    file = tmp_path / "red.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms: list[Any] = [
        *(data, bytearray(data), str(file), file, f"file://{file}", url),
        *({"bytes": data, "path": None}, {"bytes": None, "path": str(file)}, {"url": url}),
        picture("red"),
    ]
    digests = {reader.read(form).digest for form in forms}
    assert len(digests) == 1
    read = reader.read(data)
    assert reader.read(read) is read and read.tokens == 6 and read.data == data


def test_settings_are_part_of_the_digest(folder: Path, tmp_path: Path) -> None:
    other = make_seeing(tmp_path / "other", "qwen3_vl")
    text = (other / "preprocessor_config.json").read_text()
    (other / "preprocessor_config.json").write_text(text.replace("0.48145466", "0.5"))
    one, two = (reader_for(each).read(picture("red")) for each in (folder, other))
    assert one.data == two.data and one.digest != two.digest and one.first != two.first
    with pytest.raises(ValueError, match="by an image processor with other settings"):
        reader_for(other).pixels(one)


def test_pixels_are_those_of_transformers(folder: Path, reader: ImageReader) -> None:
    from transformers import AutoImageProcessor

    image = picture("blue", (120, 150))
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    expected = processor(images=[image], return_tensors="pt")
    read = reader.read(image)
    assert reader.pixels(read).equal(expected["pixel_values"])
    assert read.grid == tuple(expected["image_grid_thw"][0].tolist())


def test_transparent_and_grey_pictures_are_read(reader: ImageReader) -> None:
    clear = Image.new("RGBA", (84, 56), (255, 0, 0, 0))
    white = Image.new("RGB", (84, 56), "white")
    seen = [reader.pixels(reader.read(each)) for each in (clear, white)]
    assert torch.equal(*seen)
    for mode in ("L", "P", "CMYK", "1", "I;16", "LA"):
        assert reader.read(Image.new(mode, (84, 56))).tokens == 6


def test_sixteen_bits_and_orientation_are_seen_as_they_are(reader: ImageReader) -> None:
    grey = Image.new("L", (84, 56), 156)
    deep = Image.new("I;16", (84, 56), 40_000)
    wide = Image.new("I", (84, 56), 40_000)
    for form in (png(deep), deep, wide):
        assert torch.equal(*(reader.pixels(reader.read(each)) for each in (grey, form)))
    clear = Image.new("LA", (84, 56), (0, 0))
    white = Image.new("RGB", (84, 56), "white")
    assert torch.equal(*(reader.pixels(reader.read(each)) for each in (clear, white)))
    turned, file = picture("red"), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    turned.save(file, "PNG", exif=exif)
    upright = reader.pixels(reader.read(turned.rotate(-90, expand=True)))
    opened = Image.open(io.BytesIO(file.getvalue()))
    for form in (file.getvalue(), opened):
        assert torch.equal(reader.pixels(reader.read(form)), upright)
    with pytest.raises(ValueError, match="has the mode F"):
        reader.read(Image.new("F", (84, 56), 0.5))


def bomb() -> bytes:
    """A file of a hundred bytes that says it has 10^10 pixels."""
    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "of 0 bytes cannot be decoded"),
    "text": (b"hello", "of 5 bytes cannot be decoded"),
    "cut": (png(picture("red"))[:-80], "cannot be decoded"),
    "bomb": (bomb(), "100000 x 100000 pixels: expected at most|cannot be decoded"),
    "number": (17, "a picture is 17: expected bytes, a path"),
    "none": (None, "a picture is NoneType: expected bytes, a path"),
    "empty dictionary": ({}, "expected its `bytes`, `path` or `url`"),
    "no file": ("/nowhere/at.png", "file '/nowhere/at.png' does not exist"),
    "folder": ("/", "does not exist"),
    "address": ("https://example.org/a.png", "pictures are not fetched"),
    "data URL without base64": ("data:image/png,abc", "is not in base64"),
    "damaged base64": ("data:image/png;base64,@@@@", "data URL is damaged"),
    "video": (b"\x00\x00\x00\x18ftypmp42" + bytes(64), "cannot be decoded"),
    "cut image": (Image.open(io.BytesIO(png(picture("red"))[:-80])), "cannot be written as PNG"),
    "strip": (picture("red", (3000, 2)), "aspect ratio"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unreadable_picture_gets_a_sentence(reader: ImageReader, name: str) -> None:
    source, expected = BAD[name]
    with pytest.raises(ValueError, match=expected):
        reader.read(source)


def test_files_that_are_too_large_are_not_read(
    reader: ImageReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(picture("red"))
    monkeypatch.setattr(module, "MOST_BYTES", len(data) - 1)
    file = tmp_path / "a.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, str(file), url):
        with pytest.raises(ValueError, match="bytes"):
            reader.read(source)


def test_a_pipe_is_no_file(reader: ImageReader, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match="does not exist"):
        reader.read(str(tmp_path / "pipe.png"))


def test_flipped_bytes_are_read_or_refused(reader: ImageReader) -> None:
    file = io.BytesIO()
    picture("red").save(file, "JPEG")
    rng = random.Random(0)
    for data in (png(picture("red")), file.getvalue()):
        for _ in range(60):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                assert isinstance(reader.read(bytes(broken)), Picture)
            except ValueError as error:
                assert "picture" in str(error)


def test_models_that_see_nothing_have_no_reader(tiny_dir: Path, folder: Path) -> None:
    assert make_reader(str(tiny_dir), model_config(str(tiny_dir))) is None
    assert make_reader(str(folder), model_config(str(folder))) is not None
