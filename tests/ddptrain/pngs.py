"""Encode PNG images of every supported kind, and headers of unsupported ones."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a PNG chunk: length, kind, body, checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width: int, height: int, *, depth: int = 8, colour: int = 0, interlaced: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))


def encode(pixels: npt.NDArray[np.uint8], filters: list[int] | None = None) -> bytes:
    """Return the PNG of (height, width, channels) pixels; section 9 of the PNG specification defines the filters."""
    height, width, channels = pixels.shape
    kinds = filters or [0] * height
    data = bytearray()
    for y in range(height):
        data.append(kinds[y])
        for x in range(width):
            for c in range(channels):
                left = int(pixels[y, x - 1, c]) if x else 0
                above = int(pixels[y - 1, x, c]) if y else 0
                corner = int(pixels[y - 1, x - 1, c]) if x and y else 0
                p = left + above - corner
                paeth = min((left, above, corner), key=lambda value: abs(p - value))
                guess = (0, left, above, (left + above) // 2, paeth)[kinds[y]]
                data.append((int(pixels[y, x, c]) - guess) % 256)
    body = zlib.compress(bytes(data))
    half = len(body) // 2  # in two chunks, as encoders do
    colour = _COLOUR_TYPE[channels]
    return (
        SIGNATURE
        + header(width, height, colour=colour)
        + chunk(b"tEXt", b"Software\0test")
        + chunk(b"IDAT", body[:half])
        + chunk(b"IDAT", body[half:])
        + chunk(b"IEND", b"")
    )
