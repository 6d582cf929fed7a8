"""What can be told about a video file without decoding it: missing, empty, a pointer, cut,
damaged."""

import os
from pathlib import Path

from wamlab.config import UserError


class VideoError(UserError):
    """A video file, or a time in it, that cannot be read exactly: file, cause, what is allowed."""


def refuse_unreadable(path: str | Path) -> None:
    """Refuse a file that holds no video data at all.

    Raises:
        VideoError: missing, a folder, empty, or a Git-LFS pointer.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise VideoError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise VideoError(f"{path}: empty (0 bytes): copy or record it again")
    if head.startswith(b"version https://git-lfs"):
        raise VideoError(f"{path}: a Git-LFS pointer, not the video: run `git lfs pull`")


def cause(path: str | Path, error: BaseException) -> str:
    """Return why FFmpeg could not open a file, in words that say what to do."""
    text = getattr(error, "strerror", None) or str(error)
    with open(path, "rb") as file:
        head = file.read(12)
    if head[4:8] == b"ftyp" and not _has_index(path):
        return f"no index (no moov box): cut off before its end, or never finished ({text})"
    return f"not a readable video ({text})"


def _has_index(path: str | Path) -> bool:
    size, at = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while at + 8 <= size:
            file.seek(at)
            length, kind = int.from_bytes(file.read(4), "big"), file.read(4)
            if kind == b"moov":
                return at + length <= size
            if length == 1:
                length = int.from_bytes(file.read(8), "big")
            if length < 8:
                return False
            at += length
    return False
