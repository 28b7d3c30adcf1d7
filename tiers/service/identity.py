"""Who a node is: an id that survives restarts, and an epoch that changes with each."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass

from kvpool.config.loader import NodeConfig


@dataclass(slots=True, frozen=True)
class NodeIdentity:
    """What names one start of a node.

    Attributes:
        epoch: microseconds since 1970 at the start, so that it grows across reboots too.
        host: label of the machine.
    """

    node_id: str
    epoch: int
    host: str


def identify(config: NodeConfig) -> NodeIdentity:
    """The identity of a node that starts now."""
    return NodeIdentity(_node_id(config), time.time_ns() // 1000, config.host_label)


def _node_id(config: NodeConfig) -> str:
    """The configured id, else one kept with the data, else a fresh UUID."""
    if config.node_id is not None:
        return config.node_id
    keeps = [config.data_dir] if config.data_dir else list(config.nvme_directories)
    paths = [keep / "node_id" for keep in keeps]
    node_id = next((path.read_text().strip() for path in paths if path.is_file()), "")
    node_id = node_id or str(uuid.uuid4())
    for path in paths:  # with each device: any of them may be missing at the next start
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(node_id)
    return node_id
