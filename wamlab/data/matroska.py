"""Compare a Matroska or WebM file's elements with their sizes and checksums."""

import os
import zlib
from pathlib import Path
from typing import BinaryIO

from wamlab.data.container import VideoError

EBML, SEGMENT, CRC = 0x1A45DFA3, 0x18538067, 0xBF
TOP = {
    0x114D9B74: "SeekHead",
    0x1549A966: "Info",
    0x1654AE6B: "Tracks",
    0x1F43B675: "Cluster",
    0x1C53BB6B: "Cues",
    0x1254C367: "Tags",
    0x1043A770: "Chapters",
    0x1941A469: "Attachments",
    0xEC: "Void",
    CRC: "CRC-32",
}


def check_matroska(path: str | Path) -> None:
    """Walk the top elements of a Matroska file and compare those that carry a checksum with it.

    Files of other kinds pass; so does what follows an element of unknown size (a live recording).

    Raises:
        VideoError: truncated, elements that do not add up, or a wrong checksum.
    """
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        kind, length = _element(file)
        if kind != EBML or length is None:
            return
        file.seek(length, os.SEEK_CUR)
        kind, length = _element(file)
        if kind != SEGMENT:
            raise VideoError(f"{path}: damaged: its head is not followed by a segment")
        end = total if length is None else file.tell() + length
        if end > total:
            raise VideoError(f"{path}: truncated: {end - total} of {end} bytes are missing")
        while file.tell() < end:
            at = file.tell()
            kind, length = _element(file)
            if length is None and kind in TOP:
                return
            if kind not in TOP or file.tell() + length > end:
                raise VideoError(f"{path}: damaged at byte {at}: no element of a video ends there")
            if not _sound(file.read(length)):
                raise VideoError(f"{path}: damaged: the checksum of its {TOP[kind]} is wrong")


def _element(file: BinaryIO) -> tuple[int, int | None]:
    """Return an element's id and the length of its content (None: unknown)."""
    first = file.read(1)
    if not first or not first[0]:
        return 0, 0
    width = 9 - first[0].bit_length()
    kind = int.from_bytes(first + file.read(width - 1), "big")
    first = file.read(1)
    if not first or not first[0]:
        return 0, 0
    width = 9 - first[0].bit_length()
    marked = int.from_bytes(first + file.read(width - 1), "big")
    length = marked - (1 << 7 * width)
    return kind, None if length == (1 << 7 * width) - 1 else length


def _sound(content: bytes) -> bool:
    """Say whether an element that begins with a CRC-32 has the content that it was made from."""
    if content[:2] != bytes([CRC, 0x84]):
        return True
    return zlib.crc32(content[6:]) == int.from_bytes(content[2:6], "little")
