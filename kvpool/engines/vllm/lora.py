"""The content of the LoRA adapter that a request runs with, if it is certain.

vLLM knows adapters by number, loads them on first use, and again after it has dropped one. So each
number is bound to the content of its files when it was first seen. If the name or files change
later, it is unknown what vLLM has loaded, and requests with that number share nothing.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kvpool.blocks.model_revision import file_digest
from kvpool.errors import ModelNotFound

log = structlog.get_logger(__name__)

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MAX_NUMBERS = 16_384  # numbers remembered; forgetting one could mean trusting changed files
_Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True, eq=False)
class _Bound:
    """What a number is bound to: name, path, state of the files, and the hash of their content."""

    name: str
    path: str
    stamp: _Stamp
    content: Future[str]


class LoraVersions:
    """Versions of adapters by their content.

    A thread reads the files, so the scheduling loop does not wait for them. Until a new adapter's
    content is known, its requests share nothing.

    Args:
        traits: what else changes an adapter's effect, e.g. the dtype that it is loaded as.
    """

    def __init__(self, traits: str = "") -> None:
        self._traits = traits
        self._lock = threading.Lock()
        self._bound: dict[int, _Bound | None] = {}  # None: uncertain for good
        self._is_full = False
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="kvpool-lora")

    def version_of(self, lora: Any, wait_s: float = 0.0) -> str | None:
        """Name and content of vLLM's `LoRARequest`; None if they are not known yet, or uncertain.

        Args:
            wait_s: how long to wait for the content of a new adapter.
        """
        bound = self._bind(lora)
        if bound is None:
            return None
        try:
            content = bound.content.result(wait_s)
        except TimeoutError:
            return None
        except (OSError, ModelNotFound) as error:
            log.warning("an adapter's files cannot be read", lora=lora.lora_name, error=str(error))
            self._give_up(lora.lora_int_id)
            return None
        return f"{lora.lora_name}@{content}:{self._traits}:{int(lora.is_3d_lora_weight)}"

    def close(self) -> None:
        """Stop reading files."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _bind(self, lora: Any) -> _Bound | None:
        number = lora.lora_int_id
        if lora.load_inplace:  # vLLM reloads it on every use, so its content may change at any time
            self._give_up(number)
            return None
        stamp = _stamp(lora.lora_path)
        with self._lock:
            if number not in self._bound:
                if len(self._bound) >= MAX_NUMBERS:
                    self._warn_full(lora.lora_name)
                    return None
                self._bound[number] = (
                    _Bound(
                        lora.lora_name,
                        lora.lora_path,
                        stamp,
                        self._readers.submit(_content, lora.lora_path, stamp),
                    )
                    if stamp
                    else None
                )
                if not stamp:
                    log.warning("an adapter's files are not on this host", lora=lora.lora_name)
            bound = self._bound[number]
        if bound is None:
            return None
        if (bound.name, bound.path, bound.stamp) != (lora.lora_name, lora.lora_path, stamp):
            log.warning("an adapter's files or name changed under its number", lora=lora.lora_name)
            self._give_up(number)
            return None
        return bound

    def _warn_full(self, name: str) -> None:
        if not self._is_full:
            self._is_full = True
            log.warning(
                "requests of new adapters share nothing until vLLM restarts",
                lora=name,
                adapters_seen=MAX_NUMBERS,
            )

    def _give_up(self, number: int) -> None:
        with self._lock:
            if number in self._bound or len(self._bound) < MAX_NUMBERS:
                self._bound[number] = None


def _stamp(path: str) -> _Stamp:
    found = []
    for name in _FILES:
        try:
            stat = (Path(path).expanduser() / name).stat()
        except OSError:
            continue
        found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found) if len(found) > 1 else ()


def _content(path: str, stamp: _Stamp) -> str:
    digest = hashlib.sha256()
    for name, *_ in stamp:
        digest.update(hashlib.sha256(name.encode()).digest())
        digest.update(file_digest(Path(path).expanduser() / name))
    if _stamp(path) != stamp:
        raise ModelNotFound(f"{path} changed while it was read")
    return digest.hexdigest()
