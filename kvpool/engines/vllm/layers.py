"""Layers that become final or arrive while the model computes others, and their bytes in a page."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.threads import DeviceEvent

# of all blocks of a job; smaller groups cost more in calls than they overlap
MIN_GROUP_BYTES = 1 << 20


class Progress:
    """How many leading layers are ready. Threads may share it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._is_ready = [False] * len(names)
        self._ready = 0
        self._event: DeviceEvent | None = None
        self._has_ended = False
        self._changed = threading.Condition()

    def layer(self, name: str, device: torch.device | None = None) -> None:
        """Mark a layer as ready: now, or once `device` has done the work launched so far."""
        index = self._index.get(name)
        if index is None:
            return  # a layer that shares another layer's KV
        with self._changed:
            self._is_ready[index] = True
            before = self._ready
            while self._ready < len(self._is_ready) and self._is_ready[self._ready]:
                self._ready += 1
            if self._ready > before:
                self._event = DeviceEvent(device) if device is not None else None
                self._changed.notify_all()

    def reach(self, layers: int) -> None:
        """Mark the first `layers` layers as ready."""
        with self._changed:
            self._ready = max(self._ready, layers)
            self._changed.notify_all()

    def end(self, device: torch.device | None = None) -> None:
        """End all waits: no more layers will come.

        With `device`, all layers are ready once it is done.
        """
        with self._changed:
            self._has_ended = True
            if device is not None:
                self._ready, self._event = len(self._is_ready), DeviceEvent(device)
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._has_ended

    def wait(self, layers: int, deadline: float) -> bool:
        """Wait for the first `layers` layers until `deadline` (monotonic).

        Returns whether they are ready.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready >= layers or self._has_ended,
                max(0.0, deadline - time.monotonic()),
            )
            is_ready, event = self._ready >= layers, self._event
        if is_ready and event is not None:
            event.wait()
        return is_ready

    def wait_for(self, name: str, deadline: float) -> bool:
        """Wait for a layer and those before it, as `wait`."""
        index = self._index.get(name)
        return index is None or self.wait(index + 1, deadline)

    def wait_end(self, deadline: float) -> bool:
        """Wait for `end` until `deadline` (monotonic seconds). Returns whether it was called."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._has_ended, max(0.0, deadline - time.monotonic())
            )


class Slices:
    """Groups of layers large enough to be worth a call, and their byte ranges in a block."""

    def __init__(self, paged: PagedKV, pages_per_block: int) -> None:
        self._paged = paged
        self._pages_per_block = pages_per_block

    def groups(self, blocks: int) -> list[slice]:
        """The layers to move together in a job of `blocks` blocks."""
        layers = len(self._paged.layer_names)
        layer_bytes = max(1, blocks * self._pages_per_block * self._paged.layer_bytes)
        step = min(layers, max(1, -(-MIN_GROUP_BYTES // layer_bytes)))
        return [slice(a, b) for a, b in pairwise([*range(0, layers, step), layers])]

    def ranges(self, layers: slice) -> tuple[list[int], int]:
        """The offsets of these layers in a block, and the length of each range."""
        layer_bytes, page_bytes = self._paged.layer_bytes, self._paged.page_bytes
        start = layers.start * layer_bytes
        offsets = [start + page * page_bytes for page in range(self._pages_per_block)]
        return offsets, (layers.stop - layers.start) * layer_bytes
