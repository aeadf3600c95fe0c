"""A reader of PNG images, as PNG (Portable Network Graphics) Specification, W3C, defines them; zlib and NumPy suffice.

It takes what drawing programs save: 8 bits per channel, grey, RGB, or either with transparency, not interlaced; and
says by name what else it met.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddptrain.errors import DataCorrupt, DataMissing

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 4096 * 4096  # a few kilobytes can inflate to gigabytes
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # colour type to channels; 3 is a palette
_NEXT = "save it as an 8-bit grey or RGB PNG without interlacing"

Pixels = npt.NDArray[np.uint8]


def read(path: Path) -> Pixels:
    """The image as (height, width, channels) uint8; channels are grey, grey + alpha, RGB or RGB + alpha.

    Raises:
        DataError: unreadable, damaged, or of a kind this reader does not take.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror}", next_step="name a PNG file") from error
    try:
        return decode(content)
    except ValueError as error:
        raise DataCorrupt(f"{path}: {error}", next_step=_NEXT) from error


def decode(content: bytes) -> Pixels:
    """As ``read``, of the bytes of a file.

    Raises:
        ValueError: saying what is wrong.
    """
    if not content.startswith(SIGNATURE):
        raise ValueError("not a PNG image")
    width = height = channels = 0
    compressed: list[bytes] = []
    for kind, body in _chunks(content):
        if kind == b"IHDR":
            width, height, channels = _header(body)
        elif kind == b"IDAT":
            compressed.append(body)
        elif kind == b"IEND":
            break
        elif not kind[0] & 0x20 and kind != b"PLTE":  # an upper-case first letter: it cannot be shown without it
            raise ValueError(f"needs the unknown chunk {kind.decode('latin-1')}")
    if not channels or not compressed:
        raise ValueError("damaged: header or image data is missing")
    return _unfilter(_inflate(b"".join(compressed), height * (1 + width * channels)), (height, width, channels))


def _chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(SIGNATURE)
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        end = at + 12 + length
        if end > len(content):
            raise ValueError("damaged: it ends too early")
        if zlib.crc32(kind + body) != int.from_bytes(content[end - 4 : end], "big"):
            raise ValueError(f"damaged: the checksum of {kind.decode('latin-1')} is wrong")
        found.append((kind, body))
        at = end
        if kind == b"IEND":
            break
    return found


def _header(body: bytes) -> tuple[int, int, int]:
    if len(body) != 13:
        raise ValueError("damaged: a header of the wrong length")
    width, height = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
    depth, colour, _, _, interlaced = body[8:]
    if colour == 3:
        raise ValueError("an image with a palette is not read")
    if depth != 8 or colour not in _CHANNELS:
        raise ValueError(f"{depth} bits per channel (colour type {colour}) are not read, only 8")
    if interlaced:
        raise ValueError("an interlaced image is not read")
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"{width}×{height} pixels are not between 1 and {MAX_PIXELS:,}")
    return width, height, _CHANNELS[colour]


def _inflate(compressed: bytes, size: int) -> bytes:
    try:
        raw = zlib.decompressobj().decompress(compressed, size + 1)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error
    if len(raw) != size:
        raise ValueError("damaged: its pixels are not as many as its header says")
    return raw


def _unfilter(raw: bytes, shape: tuple[int, int, int]) -> Pixels:
    """Undo the filter of each line (specification, section 9), which predicts a byte from those left and above."""
    height, width, channels = shape
    lines = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * channels)
    above = [0] * (width * channels)
    image = np.empty((height, width * channels), np.uint8)
    for row, line in enumerate(lines):
        kind, values = int(line[0]), line[1:].tolist()
        if kind > 4:
            raise ValueError(f"damaged: unknown filter {kind}")
        if kind:
            _unfilter_line(kind, values, above, channels)
        image[row] = values
        above = values
    return image.reshape(shape)


def _unfilter_line(kind: int, line: list[int], above: list[int], channels: int) -> None:
    for i in range(len(line)):
        left = line[i - channels] if i >= channels else 0
        corner = above[i - channels] if i >= channels else 0
        guess = (left, above[i], (left + above[i]) // 2, _paeth(left, above[i], corner))[kind - 1]
        line[i] = (line[i] + guess) & 0xFF


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    distances = (abs(estimate - left), abs(estimate - above), abs(estimate - corner))
    return (left, above, corner)[distances.index(min(distances))]
