"""`hazard`: evicts the blocks that promise the fewest hits per second in the cache, learned from the requests.

Blocks last used together form a record and are treated alike: the next turn of the conversation
asks for all of them, head first, so tails are evicted before heads. A prefix that branches often (a
system prompt, a document) is a record of its own. Each record has an index, from how soon similar
records have returned (`HazardModel`); the lowest index is evicted first.

It needs facts about each request that a node's store does not give to its policies. So it is a
cache for replays, not one of `POLICIES`. docs/eviction.md describes it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import log2
from typing import ClassVar

import numpy as np

from planner.replay.hazard_model import BINS, EDGES_S, HazardModel, age_bins

_HUB_BRANCHES = 2  # prompts that went on differently behind a block, before it counts as shared
_BATCH = 256  # outcomes that one step of learning takes
_FEW = 1 / 512  # share of the records that one look queues for eviction
# Rows of the model's weights: own and shared records by turn (or use), new tokens, output, pause,
# prompt.
_TURN, _SHARED, _NEW, _OUTPUT, _GAP, _INPUT = 0, 8, 16, 30, 42, 54
_ROWS = 66


class Record:
    """Blocks last used together. Later records take over some; the rest stay until they are evicted."""

    __slots__ = (
        "end",
        "features",
        "ids",
        "input_tokens",
        "is_shared",
        "left",
        "output_tokens",
        "returned_s",
        "slot",
        "time_s",
        "turn",
    )

    def __init__(self, time_s: float, ids: list[int], features: tuple[int, ...], turn: int) -> None:
        self.time_s = time_s
        self.ids = ids  # the first `left` are not evicted yet
        self.left = len(ids)
        self.features = features
        self.turn = turn
        self.returned_s: float | None = None
        self.slot = -1
        self.is_shared = False  # then the next record holds the rest of its prompt
        self.input_tokens = self.output_tokens = 0


class HazardCache:
    """A cache of `capacity` blocks, by their ids.

    Attributes:
        resident: the ids in the cache, each with its record.
        evicted: the ids that the last access evicted.
    """

    name: ClassVar[str] = "hazard"

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._model = HazardModel(_ROWS)
        self.resident: dict[int, Record] = {}
        self.evicted: list[int] = []
        # Remembered beyond the cache, the oldest forgotten first: evicted blocks, the last full
        # blocks of prompts, and blocks after which prompts differed (how often, and the last
        # record).
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._ends: OrderedDict[int, Record] = OrderedDict()
        self._branches: OrderedDict[int, int] = OrderedDict()
        self._hubs: dict[int, Record] = {}
        self._remembered = max(1 << 14, 8 * capacity)
        # The records that may hold blocks, by slot, so that one pass of numpy looks at all.
        self._records: list[Record | None] = []
        self._free: list[int] = []
        self._times = np.zeros(64)
        self._indices = np.full((64, BINS), np.inf)
        self._fresh: list[Record] = []
        self._tails: list[Record] = []  # whose last block is not full: it is hardly ever used again
        self._queue: list[Record] = []  # next to go at the end
        self._requests_since_look = 0
        self._renewed = 0  # slots of this round
        self._waiting: list[deque[Record]] = [deque() for _ in range(BINS)]
        self._outcomes: tuple[list[tuple[int, ...]], list[int], list[bool]] = ([], [], [])

    def __len__(self) -> int:
        return len(self.resident)

    def __contains__(self, ident: int) -> bool:
        return ident in self.resident

    def access(self, ids: list[int], now_s: float, input_tokens: int, output_tokens: int) -> int:
        """Use a prompt's blocks. Returns how many leading ones were in the cache."""
        resident = self.resident
        found = 0
        for ident in ids:
            if ident not in resident:
                break
            found += 1
        self.evicted.clear()
        if ids:
            self._take_in(ids, found, now_s, input_tokens, output_tokens)
            self._requests_since_look += 1
            if len(resident) > self._capacity:
                self._make_room(now_s)
        return found

    # ------------------------------------------------------------ what is asked

    def _take_in(
        self, ids: list[int], found: int, now_s: float, input_tokens: int, output_tokens: int
    ) -> None:
        known = found
        ghosts, resident = self._ghosts, self.resident
        while known < len(ids) and (ids[known] in ghosts or ids[known] in resident):
            known += 1
        before = self._turn_before(ids, known)
        if 0 < known < len(ids) and before is None:
            self._note_branch(ids[known - 1])
        start = self._take_hubs(ids, known, now_s)
        turn, gap, new = 1, 0, 0
        if before is not None:
            gap_s = now_s - before.time_s
            turn = before.turn + 1
            gap = min(11, 1 + _log2(gap_s))
            fresh = input_tokens - before.input_tokens - before.output_tokens
            new = 1 if fresh <= 0 else min(13, 2 + _log2(fresh))
            self._supersede(before, gap_s)
        features = (
            _TURN + min(turn, 7),
            _NEW + new,
            _OUTPUT + min(11, _log2(output_tokens)),
            _GAP + gap,
            _INPUT + min(11, max(0, _log2(input_tokens) - 6)),
        )
        if start == len(ids):
            return
        record = self._add_record(ids[start:] if start else ids, now_s, features, turn)
        record.input_tokens, record.output_tokens = input_tokens, output_tokens
        full = input_tokens // self._block_tokens
        if full < len(ids):
            self._tails.append(record)
        if 0 < full <= len(ids) and full > start:
            self._ends[ids[full - 1]] = record
            self._ends.move_to_end(ids[full - 1])
            if len(self._ends) > self._remembered:
                self._ends.popitem(last=False)

    def _turn_before(self, ids: list[int], known: int) -> Record | None:
        """The record of the request that this one continues: the prompt begins with all its full blocks."""
        ends = self._ends
        for at in range(known - 1, -1, -1):
            record = ends.get(ids[at])
            if record is not None:
                return record if ids[at] not in self._hubs else None
        return None

    def _note_branch(self, ident: int) -> None:
        self._branches[ident] = self._branches.get(ident, 0) + 1
        self._branches.move_to_end(ident)
        if len(self._branches) > self._remembered:
            self._hubs.pop(self._branches.popitem(last=False)[0], None)

    def _take_hubs(self, ids: list[int], known: int, now_s: float) -> int:
        """Make records of the shared parts of a prompt. Returns where its own part starts."""
        start = 0
        branches = self._branches
        for at in range(known if branches else 0):
            if branches.get(ids[at], 0) < _HUB_BRANCHES:
                continue
            before = self._hubs.get(ids[at])
            turn, gap = 1, 0
            if before is not None:
                gap_s = now_s - before.time_s
                turn = before.turn + 1
                gap = min(11, 1 + _log2(gap_s))
                self._supersede(before, gap_s)
            features = (_SHARED + min(7, _log2(turn)), _NEW, _OUTPUT, _GAP + gap, _INPUT)
            record = self._add_record(ids[start : at + 1], now_s, features, turn)
            record.is_shared = at + 1 < len(ids)
            self._hubs[ids[at]] = record
            start = at + 1
        return start

    def _supersede(self, record: Record, gap_s: float) -> None:
        """A later prompt continued this record, so the blocks that remain in it are useless."""
        if record.returned_s is None:
            record.returned_s = gap_s
        if record.ids:
            self._indices[record.slot] = 0.0

    def _add_record(
        self, ids: list[int], now_s: float, features: tuple[int, ...], turn: int
    ) -> Record:
        record = Record(now_s, ids, features, turn)
        self.resident.update(dict.fromkeys(ids, record))
        if self._free:
            slot = self._free.pop()
            self._records[slot] = record
        else:
            slot = len(self._records)
            self._records.append(record)
            if slot == len(self._times):
                self._times = np.concatenate([self._times, np.zeros(slot)])
                self._indices = np.concatenate([self._indices, np.full((slot, BINS), np.inf)])
        record.slot = slot
        self._times[slot] = now_s
        self._fresh.append(record)
        self._waiting[0].append(record)
        return record

    # ------------------------------------------------------------ what goes

    def _make_room(self, now_s: float) -> None:
        resident, capacity = self.resident, self._capacity
        if self._requests_since_look > len(self._records) * _FEW:
            self._queue.clear()
        while self._tails and len(resident) > capacity:
            record = self._tails.pop()
            if record.left:
                self._drop_last(record)
        while len(resident) > capacity:
            if not self._queue:
                self._look(now_s)
            record = self._queue[-1]
            while record.left and len(resident) > capacity:
                self._drop_last(record)
            if not record.left:
                self._queue.pop()
                self._retire(record)

    def _drop_last(self, record: Record) -> None:
        record.left -= 1
        ident = record.ids[record.left]
        if self.resident.get(ident) is record:
            del self.resident[ident]
            self.evicted.append(ident)
            self._ghosts[ident] = None
            if len(self._ghosts) > self._remembered:
                self._ghosts.popitem(last=False)

    def _retire(self, record: Record) -> None:
        """Free the slot of a record without blocks. The model still learns from its return."""
        record.ids = []
        self._records[record.slot] = None
        self._indices[record.slot] = np.inf
        self._free.append(record.slot)

    def _look(self, now_s: float) -> None:
        """Queue the records with the lowest indices for eviction, and learn from the known outcomes."""
        self._learn(now_s)
        self._renew()
        if self._fresh:
            over = [record.returned_s is not None for record in self._fresh]
            rows = self._model.indices([record.features for record in self._fresh])
            # A shared part is worth at least as much as the records after it, which came with it.
            for at in range(len(rows) - 2, -1, -1):
                if self._fresh[at].is_shared:
                    np.maximum(rows[at], rows[at + 1], out=rows[at])
            rows[over] = 0.0
            self._indices[[record.slot for record in self._fresh]] = rows
            self._fresh.clear()
        count = len(self._records)
        bins = age_bins(now_s - self._times[:count])
        values = self._indices[np.arange(count), bins]
        few = min(count, 8 + int(count * _FEW))
        lowest = np.argpartition(values, few - 1)[:few] if few < count else np.arange(count)
        order = lowest[np.argsort(values[lowest], kind="stable")[::-1]].tolist()
        self._queue = [record for slot in order if (record := self._records[slot]) is not None]
        self._requests_since_look = 0

    def _renew(self) -> None:
        """Update the indices of a few records, in turn, with what was learned since they were made."""
        end = min(len(self._records), self._renewed + 4 + len(self._records) // 128)
        records = [r for r in self._records[self._renewed : end] if r and r.returned_s is None]
        self._renewed = end if end < len(self._records) else 0
        if not records:
            return
        rows = self._model.indices([record.features for record in records])
        for record, row in zip(records, rows, strict=True):
            if record.is_shared:  # the records after it count with their old index
                np.maximum(row, self._indices[record.slot], out=row)
        self._indices[[record.slot for record in records]] = rows

    def _learn(self, now_s: float) -> None:
        features, bins, returned = self._outcomes
        for number, waiting in enumerate(self._waiting):
            edge_s = float(EDGES_S[number + 1])
            while waiting and waiting[0].time_s + edge_s <= now_s:
                record = waiting.popleft()
                is_back = record.returned_s is not None and record.returned_s <= edge_s
                features.append(record.features)
                bins.append(number)
                returned.append(is_back)
                if not is_back and number + 1 < BINS:
                    self._waiting[number + 1].append(record)
        if len(features) >= _BATCH:
            self._model.learn(features, bins, returned)
            self._outcomes = ([], [], [])


def _log2(value: float) -> int:
    return int(log2(value)) if value >= 1 else 0
