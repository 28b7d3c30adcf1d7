"""Links and disks on the virtual clock: each host's two directions are queues, and so is each disk.

A transfer begins when sender and receiver are both free, and takes latency + bytes / bandwidth.
Real flows share a link; queues are coarser but also keep every host within its line rate.
"""

from __future__ import annotations

from collections import defaultdict

from conductor.scheduling.cost_model import LinkProfile


class Network:
    """The queues of links and disks. `moved` counts bytes by kind of path."""

    def __init__(self, same_host: LinkProfile, other_host: LinkProfile) -> None:
        self.same_host = same_host
        self.other_host = other_host
        self.moved: dict[str, float] = defaultdict(float)
        self._sending: dict[str, float] = defaultdict(float)
        self._receiving: dict[str, float] = defaultdict(float)
        self._disks: dict[str, float] = defaultdict(float)

    def transfer(self, now: float, source: str, target: str, size_bytes: float) -> float:
        """The time at which `size_bytes` that are ready now have arrived."""
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
        """The time at which bytes that become ready layer by layer from `begins` to `complete` have arrived.

        The last layer's transfer starts when it is complete. The link is busy only for the duration
        of the bytes at line rate, so other transfers can use the rest of the interval.
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
            self._sending[source] = self._receiving[target] = start + takes_s
        return link.latency_s + max(start + takes_s, complete + takes_s / layers)

    def read_disk(self, now: float, node_id: str, size_bytes: float, bytes_per_s: float) -> float:
        """The time at which a node's disk has read `size_bytes` into memory."""
        if size_bytes <= 0:
            return now
        self.moved["nvme"] += size_bytes
        end = max(now, self._disks[node_id]) + size_bytes / bytes_per_s
        self._disks[node_id] = end
        return end

    def disk_queue_bytes(self, now: float, node_id: str, bytes_per_s: float) -> int:
        """The bytes that wait to be read from a node's disk."""
        return int(max(0.0, self._disks[node_id] - now) * bytes_per_s)
