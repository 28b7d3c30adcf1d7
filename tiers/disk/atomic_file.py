"""Small files beside a device's manifest that help after a restart and that nothing depends on.

Each is written whole to a new file and renamed, with its version and the CRC-32 of its content in front. One that
is torn, damaged or of another version is as good as none.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from struct import Struct

import structlog

from tiers.disk.manifest import NvmeFailed, sync_directory, write_all

log = structlog.get_logger(__name__)

_HEAD = Struct("<8sIQI")  # magic, version, bytes of the content, CRC-32 of it
_MAGIC = b"kvp-file"


def write_atomic_file(path: Path, version: int, content: bytes, *, is_synced: bool) -> None:
    """Put `content` in place of what the file held, or leave that as it was.

    Args:
        is_synced: it outlasts a power failure once this returns.

    Raises:
        NvmeFailed: the disk refused.
    """
    beside = path.with_suffix(".new")
    try:
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            head = _HEAD.pack(_MAGIC, version, len(content), zlib.crc32(content))
            write_all(fd, head, 0)
            write_all(fd, content, len(head))
            if is_synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
        if is_synced:
            sync_directory(path.parent)
    except OSError as error:
        raise NvmeFailed(f"cannot write {path}: {error}") from error


def read_atomic_file(path: Path, version: int) -> bytes | None:
    """What the file holds; None where there is none, or none that can be believed (logged)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("a file cannot be read", path=str(path), error=str(error))
        return None
    if len(data) >= _HEAD.size:
        magic, known, length, crc = _HEAD.unpack_from(data)
        content = data[_HEAD.size :]
        is_whole = (magic, known, length) == (_MAGIC, version, len(content))
        if is_whole and zlib.crc32(content) == crc:
            return content
    log.warning("ignored a file that is damaged or of another version", path=str(path))
    return None
