"""The connector's threads, and events that say when a device has finished its work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch


def start_thread(name: str, work: Callable[[], None], device: torch.device) -> threading.Thread:
    """Start a daemon thread for work on `device` that may run on any core.

    vLLM binds its threads to single cores, and new threads inherit that.
    """

    def run() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class DeviceEvent:
    """A point in a device's work. `wait` returns when all work launched before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.Event(device.type)
            self._event.record()

    def wait(self) -> None:
        """Block the calling thread, without the GIL."""
        if self._event is not None:
            self._event.synchronize()
