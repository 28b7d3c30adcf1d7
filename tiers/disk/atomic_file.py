"""Small files beside a device's manifest that help after a restart; no block depends on them.

Each begins with its version and the CRC-32 of its content. It is written to a new file, which then
replaces the old one. A file that is torn, damaged or of another version is ignored.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from struct import Struct

import aiofiles
import aiofiles.os
import structlog

from tiers.disk.manifest import NvmeFailed, sync_directory

log = structlog.get_logger(__name__)
_fsync, _sync_directory = aiofiles.os.wrap(os.fsync), aiofiles.os.wrap(sync_directory)

_HEAD = Struct("<8sIQI")  # magic, version, bytes of the content, CRC-32 of it
_MAGIC = b"kvp-file"


async def write_atomic_file(path: Path, version: int, content: bytes, *, is_synced: bool) -> None:
    """Replace what the file holds, or leave it as it was. One writer at a time.

    Args:
        is_synced: the new content survives a power failure once this returns.

    Raises:
        NvmeFailed: the disk refused.
    """
    beside = path.with_suffix(".new")
    head = _HEAD.pack(_MAGIC, version, len(content), zlib.crc32(content))
    try:
        async with aiofiles.open(beside, "wb", opener=_open_private) as file:
            await file.write(head)
            await file.write(content)
            await file.flush()
            if is_synced:
                await _fsync(file.fileno())
        await aiofiles.os.replace(beside, path)
        if is_synced:
            await _sync_directory(path.parent)
    except OSError as error:
        raise NvmeFailed(f"cannot write {path}: {error}") from error


async def read_atomic_file(path: Path, version: int) -> bytes | None:
    """The content of the file; None if it is missing, or (logged) unreadable or damaged."""
    try:
        async with aiofiles.open(path, "rb") as file:
            data: bytes = await file.read()
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


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
