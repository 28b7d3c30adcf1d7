"""The revision of a model: a hash of the content of its files, equal on every host.

It becomes the `revision` of a namespace. With a path or a name instead, two models of one name
would read each other's KV.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from kvpool.errors import ModelNotFound, brief

_REVISION_FILE = ".kvpool-revision.json"
_REVISION_FORMAT = 1  # raise it when the input of the hash changes
# Keys of a config.json about who saved the files and where. They do not change what the model
# computes.
CONFIG_NOISE = ("_name_or_path", "transformers_version")
_WHOLE_FILE_BYTES = 1 << 30
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 20
_READ_BYTES = 1 << 22
_SETTLED_NS = 2_000_000_000  # coarser than the time stamps of any file system


class _Revision(msgspec.Struct):
    """The stored result of `revision_of`, and the files that it was computed from."""

    format: int
    files: list[tuple[str, int, int]]  # name, bytes, mtime in ns
    revision: str


def model_directory(spec: str, revision: str | None = None) -> Path:
    """Find the directory of a model's files on this host, from a directory or a name in Hugging
    Face's cache.

    Downloads nothing: an engine that serves the model has its files already.

    Args:
        spec: a directory with a config.json, or a name such as "Qwen/Qwen3-8B".
        revision: commit, branch or tag of a name; None: the default branch.

    Raises:
        ModelNotFound: there is no such directory, and no such name in the cache.
    """
    directory = Path(spec).expanduser()
    if spec and (directory / "config.json").is_file():
        return directory
    with suppress(ImportError, ValueError):  # the package is not installed; not a repository's name
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(spec, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
    raise ModelNotFound(
        f"no files of the model {brief(spec)!r} on this host",
        hint="give the directory of a Hugging Face model, or say the revision yourself",
    )


def revision_of(path: Path) -> str:
    """Content hash of a model's configuration and weights: 64 hex digits, equal on every host.

    Safetensors files below 1 GiB are hashed whole; of larger ones, their size, header and 64
    samples of 1 MiB. If the directory is writable, the result is stored there until a file's size
    or modification time changes.

    Raises:
        ModelNotFound: there is no config.json or no safetensors file, or they cannot be read.
    """
    config = path / "config.json"
    weights = sorted(path.glob("*.safetensors"))
    if not config.is_file() or not weights:
        raise ModelNotFound(
            f"{path} has no {'config.json' if not config.is_file() else 'safetensors file'}",
            hint="give the directory of a Hugging Face model in safetensors form",
        )
    try:
        stats = [(file.name, file.stat()) for file in (config, *weights)]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        known = _remembered(path, files)
        if known:
            return known
        digest = hashlib.sha256(f"kvpool-revision-{_REVISION_FORMAT}".encode())
        digest.update(hashlib.sha256(_config_identity(config)).digest())
        for file in weights:
            digest.update(hashlib.sha256(file.name.encode()).digest())
            digest.update(file_digest(file))
    except OSError as error:
        raise ModelNotFound(f"the model's files cannot be read: {error}") from error
    revision = digest.hexdigest()
    _remember(path, _Revision(_REVISION_FORMAT, files, revision))
    return revision


def file_digest(file: Path) -> bytes:
    """Hash a safetensors file: whole below 1 GiB, otherwise its size, header and samples.

    Raises OSError.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(file, "rb") as opened:
        if size < _WHOLE_FILE_BYTES:
            while chunk := opened.read(_READ_BYTES):
                digest.update(chunk)
            return digest.digest()
        # safetensors: 8 bytes of header length, then the header (names, types, shapes, offsets)
        header_bytes = int.from_bytes(opened.read(8), "little")
        digest.update(opened.read(min(header_bytes, size)))
        for sample in range(_SAMPLES):  # including the first and the last bytes
            opened.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


def _config_identity(config: Path) -> bytes:
    content = config.read_bytes()
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ModelNotFound(f"{config} is not a JSON object: {error}") from error
    for name in CONFIG_NOISE:
        fields.pop(name, None)
    return msgspec.json.encode(fields, order="sorted")


def _remembered(path: Path, files: list[tuple[str, int, int]]) -> str:
    try:
        content = (path / _REVISION_FILE).read_bytes()
        known = msgspec.json.decode(content, type=_Revision)
    except (OSError, msgspec.DecodeError):
        return ""  # there is none, or it is damaged: compute it
    return known.revision if (known.format, known.files) == (_REVISION_FORMAT, files) else ""


def _remember(path: Path, revision: _Revision) -> None:
    newest_ns = max(mtime_ns for _, _, mtime_ns in revision.files)
    if time.time_ns() - newest_ns < _SETTLED_NS:
        return  # written just now: another write might have the same time stamp
    temporary = path / f"{_REVISION_FILE}.{os.getpid()}"
    # If the directory cannot be written, every start hashes again.
    with suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(revision))
        temporary.replace(path / _REVISION_FILE)
