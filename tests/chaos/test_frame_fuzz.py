"""Frames, two hundred thousand in full, that no honest client sends, against a real node.

Each gets exactly one reply or typed error, or ends its own connection with a reason. Beside them a good client
is served throughout, memory stays bounded, and the node's log knows of no unhandled exception.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvpool import Pool
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import BY_CODE, KvpoolError
from kvpool.wire import messages as m
from kvpool.wire.framing import (
    HEADER,
    FrameReader,
    Kind,
    decode_error,
    decode_reply,
    decode_request,
    decoder_for,
    encode_frame,
)
from tests.chaos.frames import OF_A_NODE, REQUESTS, Fate, Frame, FrameSource
from tests.chaos.keyed import NAMESPACE, SIZE, contents, prompt, wrong_blocks
from tests.support.process_cluster import Cluster
from tests.support.sizes import random_seed, scaled

FRAMES = scaled(50_000, 200_000, "KVPOOL_FUZZ_FRAMES")
MAX_FRAME_BYTES = 256 << 10
MAX_GROWTH_BYTES = 96 << 20
ANSWER_S = 20.0
# Small blocks of a space of its own, so that its frames reach the store's depths and take little.
SPACE = Namespace("tests/fuzz", "r", Layout("uint8", 1, 1, 64, 16, tp_size=1))
SETTINGS = (
    *(
        "node.dram_bytes=8MiB",
        "node.advanced.slab_bytes=240KiB",
        f"node.advanced.max_frame_bytes={MAX_FRAME_BYTES}",
    ),
    *(
        "node.advanced.lease_s=0.5",
        "node.advanced.reservation_s=0.5",
        "node.advanced.grace_s=0.1",
        "node.advanced.quarantine_s=0.2",
    ),
    *("node.advanced.retention_share=0.2", "node.transports=shm"),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node("n0", *SETTINGS)
        yield running


class GoodClient(threading.Thread):
    """Puts and gets blocks and compares them, over and over, until told to stop."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.rounds = 0
        self.slowest_s = 0.0
        self.error: BaseException | None = None
        self._address = address
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            with Pool(node=self._address, host_label="here", timeout_s=ANSWER_S) as pool:
                while not self._is_over.wait(0.02):
                    started = time.monotonic()
                    self._round(pool, self.rounds % 50)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                    self.rounds += 1
        except (KvpoolError, AssertionError) as error:
            self.error = error

    def _round(self, pool: Pool, number: int) -> None:
        hashes = prompt(number, 4)
        put = pool.put(NAMESPACE, hashes, contents(hashes))
        assert put.stored + put.existing == 4
        out = np.zeros((4, SIZE), np.uint8)
        got = pool.get(NAMESPACE, hashes, out)
        assert wrong_blocks(hashes[: got.found], out[: got.found]) == []

    def stop(self) -> None:
        self._is_over.set()
        self.join(ANSWER_S + 5)
        assert not self.is_alive()


class Attacker:
    """Sends frames, a connection after the other, and holds the server to their fate."""

    def __init__(self, address: str, source: FrameSource, rng: random.Random) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._source = source
        self._rng = rng
        self.sent = 0
        self.connections = 0
        self.outcomes: Counter[str] = Counter()

    def connection(self) -> None:
        """One connection: frames that are served, then an end of some kind."""
        link = socket.create_connection(self._address, timeout=ANSWER_S)
        # Gone at once when closed, so that thousands of connections leave no port in TIME_WAIT.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connections += 1
        with link:
            if self._rng.random() < 0.02:  # without a greeting
                self._close(link, self._source.served(1).data)
                return
            hello = m.Hello(m.PROTOCOL_VERSION, f"fuzz-{self.connections}", "client")
            self._send(
                link, [Frame(bytes(encode_frame(0, Kind.REQUEST, hello)), Fate.ANSWER, m.Hello)]
            )
            for _ in range(
                self._rng.randint(1, 2)
            ):  # the later ones know what the earlier were granted
                count = self._rng.choice((1, 5, 20, 50, 100))
                self._send(link, [self._source.served(number) for number in range(count)])
            ending = self._rng.random()
            if ending < 0.8:
                self._close(link, self._source.fatal(1).data)
            elif ending < 0.9:
                link.sendall(self._source.truncated(1))
                self.sent += 1

    def _send(self, link: socket.socket, frames: list[Frame]) -> None:
        """Send frames numbered from 0: each request is answered once, and nothing else comes."""
        link.sendall(b"".join(frame.data for frame in frames))
        self.sent += len(frames)
        expected = {
            number: frame for number, frame in enumerate(frames) if frame.fate is Fate.ANSWER
        }
        reader = FrameReader()
        while expected:
            data = link.recv(1 << 20)
            assert data, f"closed without need before {len(expected)} answers"
            for request_id, kind, body in reader.feed(data):
                assert request_id in expected, decode_error(body)
                self._answer(expected.pop(request_id), kind, body)

    def _close(self, link: socket.socket, data: bytes) -> None:
        """This frame is answered by a reason and the end of the connection."""
        link.sendall(data)
        self.sent += 1
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # some of what we sent was unread
            while piece := link.recv(1 << 16):
                answer += piece
        for request_id, kind, body in FrameReader().feed(answer):
            assert (request_id, kind) == (0, Kind.ERROR)
            assert decode_error(body).code == "protocol"
            self.outcomes["closed with a reason"] += 1

    def _answer(self, frame: Frame, kind: int, body: memoryview) -> None:
        name = frame.request.__name__ if frame.request else "refused"
        if kind == Kind.ERROR:
            error = decode_error(body)
            assert error.code in BY_CODE, (name, error)
            assert error.code != "internal", (name, error, frame.data[:300])
            self.outcomes[f"{name}:{error.code}"] += 1
        else:
            assert kind == Kind.REPLY
            assert frame.request is not None
            reply = decode_reply(decoder_for(m.REPLIES[frame.request]), body)
            if isinstance(reply, m.PinReply) and reply.lease_id:
                self._source.leases.append(reply.lease_id)
                self._source.next_up.append(m.Renew(reply.lease_id, 0.5))
            elif isinstance(reply, m.ReserveReply) and reply.reservation_id:
                self._source.reservations.append(reply.reservation_id)
                self._source.next_up.append(m.RenewReservation(reply.reservation_id, 0.5))
                self._source.granted = reply.statuses.count(m.BlockStatus.GRANTED)
            elif isinstance(reply, m.PutInlineReply):
                put = decode_request(memoryview(frame.data[HEADER.size :]))
                assert isinstance(put, m.PutInline)
                self._source.next_up.append(m.Pin(put.namespace_id, put.block_hash, 0.5))
            self.outcomes[f"{name}:ok"] += 1


@pytest.mark.slow
def test_hostile_frames_get_typed_errors_or_close_their_own_connection_alone(
    cluster: Cluster,
) -> None:
    seed = random_seed()
    print(f"{FRAMES} frames, seed {seed}")
    rng = random.Random(seed)
    address = cluster.nodes["n0"]["wire"]
    hashes = [rng.randbytes(16) for _ in range(200)]
    attacker = Attacker(address, FrameSource(rng, SPACE, hashes, MAX_FRAME_BYTES), rng)
    with Pool(node=address) as pool:
        pool.register(SPACE)
    node = psutil.Process(cluster.member("n0").process.pid)
    good = GoodClient(address)
    good.start()
    try:
        while attacker.sent < FRAMES // 20:
            attacker.connection()
        warm_bytes = node.memory_info().rss
        while attacker.sent < FRAMES:
            attacker.connection()
            assert good.error is None, repr(good.error)
    finally:
        good.stop()
    grown = node.memory_info().rss - warm_bytes
    print(
        f"{attacker.sent} frames on {attacker.connections} connections; {good.rounds} good rounds, the "
        f"slowest {good.slowest_s:.2f} s; {grown >> 20} MiB more; {dict(sorted(attacker.outcomes.items()))}"
    )
    assert good.error is None, repr(good.error)
    assert good.rounds > 20
    assert grown < MAX_GROWTH_BYTES
    cluster.supervisor.check()
    log = cluster.member("n0").log_path.read_text()
    assert "Traceback" not in log
    # A frame may name a peer that is not there, or no peer at all; serving it must not fail.
    for allowed in ("handshake failed", "copying from a node failed"):
        log = log.replace(allowed, "")
    assert "failed" not in log, [line for line in log.splitlines() if "failed" in line][:3]
    # The frames went deep: each request of a node was carried out at times.
    for request in OF_A_NODE if FRAMES >= 100_000 else ():
        assert attacker.outcomes[f"{request.__name__}:ok"] > 0, request
    reached = {key.partition(":")[0] for key in attacker.outcomes}
    assert {request.__name__ for request in REQUESTS} - reached <= {"Hello"}
