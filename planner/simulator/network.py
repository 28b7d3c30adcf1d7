"""Links and disks on the virtual clock: each host's two directions are queues, and so is each disk. Pure.

A transfer begins when sender and receiver are both free for it and takes latency + bytes / bandwidth. That
is coarser than sharing by flows, and conserves what matters: nobody moves more than the line rate.
"""

from __future__ import annotations

from collections import defaultdict

from conductor.scheduling.cost_model import LinkProfile


class Network:
    """Occupation of links and disks; `moved` counts bytes by kind of path."""

    def __init__(self, same_host: LinkProfile, other_host: LinkProfile) -> None:
        self.same_host = same_host
        self.other_host = other_host
        self.moved: dict[str, float] = defaultdict(float)
        self.waited_s = 0.0
        self._sending: dict[str, float] = defaultdict(float)
        self._receiving: dict[str, float] = defaultdict(float)
        self._disks: dict[str, float] = defaultdict(float)

    def transfer(self, now: float, source: str, target: str, size_bytes: float) -> float:
        """When `size_bytes` that are ready now have arrived."""
        return self.stream(now, now, source, target, size_bytes, 1)

    def stream(
        self,
        begins: float,
        complete: float,
        source: str,
        target: str,
        size_bytes: float,
        layers: int,
    ) -> float:
        """When bytes that become ready layer by layer from `begins` to `complete` have all arrived.

        No earlier than the last layer's own transfer after it is complete; the link is held for as long as
        the bytes take, so that others may use what is left of it meanwhile.
        """
        if size_bytes <= 0:
            return complete
        is_near = source == target
        link = self.same_host if is_near else self.other_host
        takes_s = size_bytes / link.bytes_per_s
        self.moved["same_host" if is_near else "other_host"] += size_bytes
        if is_near:
            start = begins
        else:
            start = max(begins, self._sending[source], self._receiving[target])
            self.waited_s += start - begins
            self._sending[source] = self._receiving[target] = start + takes_s
        return link.latency_s + max(start + takes_s, complete + takes_s / layers)

    def read_disk(self, now: float, node_id: str, size_bytes: float, bytes_per_s: float) -> float:
        """When a node's disk has brought `size_bytes` into memory."""
        if size_bytes <= 0:
            return now
        self.moved["nvme"] += size_bytes
        end = max(now, self._disks[node_id]) + size_bytes / bytes_per_s
        self._disks[node_id] = end
        return end

    def disk_queue_bytes(self, now: float, node_id: str, bytes_per_s: float) -> int:
        """Bytes that a node's disk reads before anything new."""
        return int(max(0.0, self._disks[node_id] - now) * bytes_per_s)
