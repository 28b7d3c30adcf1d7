"""Layers that become final, or arrive, while the model computes others; and where they are in a page's bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.threads import DeviceEvent

MIN_GROUP_BYTES = 1 << 20  # of all blocks of a job: below it, calls cost more than they overlap


class Progress:
    """How many leading layers are there. Safe to use from several threads."""

    def __init__(self, names: Sequence[str]) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._is_there = [False] * len(names)
        self._ready = 0
        self._moment: DeviceEvent | None = None
        self._has_ended = False
        self._changed = threading.Condition()

    def layer(self, name: str, device: torch.device | None = None) -> None:
        """This layer is there, for `device` once it has done what was launched so far."""
        index = self._index.get(name)
        if index is None:
            return  # one that shares another's KV
        with self._changed:
            self._is_there[index] = True
            before = self._ready
            while self._ready < len(self._is_there) and self._is_there[self._ready]:
                self._ready += 1
            if self._ready > before:
                self._moment = DeviceEvent(device) if device is not None else None
                self._changed.notify_all()

    def reach(self, layers: int) -> None:
        """The first `layers` are there."""
        with self._changed:
            self._ready = max(self._ready, layers)
            self._changed.notify_all()

    def end(self, device: torch.device | None = None) -> None:
        """No more will come, or all of them are there: nobody needs to wait any longer."""
        with self._changed:
            self._has_ended = True
            if device is not None:
                self._ready, self._moment = len(self._is_there), DeviceEvent(device)
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._has_ended

    def wait(self, layers: int, deadline: float) -> bool:
        """Wait for the first `layers`; whether they are there. `deadline` in monotonic seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready >= layers or self._has_ended,
                max(0.0, deadline - time.monotonic()),
            )
            is_there, moment = self._ready >= layers, self._moment
        if is_there and moment is not None:
            moment.wait()
        return is_there

    def wait_for(self, name: str, deadline: float) -> bool:
        """Wait for this layer and those before it."""
        index = self._index.get(name)
        return index is None or self.wait(index + 1, deadline)

    def wait_end(self, deadline: float) -> bool:
        """Wait for `end`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._has_ended, max(0.0, deadline - time.monotonic())
            )


class Slices:
    """Groups of layers, large enough to be worth a call, and their place in the bytes of a block."""

    def __init__(self, paged: PagedKV, pages_per_block: int) -> None:
        self._paged = paged
        self._pages_per_block = pages_per_block

    def groups(self, blocks: int) -> list[slice]:
        """Neighbouring layers to move together for a job of so many blocks."""
        layers = len(self._paged.layer_names)
        layer_bytes = max(1, blocks * self._pages_per_block * self._paged.layer_bytes)
        step = min(layers, max(1, -(-MIN_GROUP_BYTES // layer_bytes)))
        return [slice(a, b) for a, b in pairwise([*range(0, layers, step), layers])]

    def ranges(self, layers: slice) -> tuple[list[int], int]:
        """Offsets within a block, and the length of each range."""
        layer_bytes, page_bytes = self._paged.layer_bytes, self._paged.page_bytes
        start = layers.start * layer_bytes
        offsets = [start + page * page_bytes for page in range(self._pages_per_block)]
        return offsets, (layers.stop - layers.start) * layer_bytes
