"""Each eviction policy written down as slowly and plainly as can be, to compare the real ones with.

Lists are searched from end to end; nothing is shared with `tiers.policies`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Item:
    """A block as a policy sees it."""

    ident: int
    size_bytes: int = 1
    cost: float = 1.0
    last_use: int = 0


MayGo = Callable[[Item], bool]


class NaiveLru:
    """The others override what they do otherwise."""

    def __init__(self) -> None:
        self.resident: list[Item] = []

    def arrive(self, item: Item) -> None:
        self.resident.append(item)

    def use(self, item: Item) -> None:
        pass

    def leave(self, item: Item, *, is_evicted: bool) -> None:
        self.resident.remove(item)

    def victim(self, may_go: MayGo) -> Item | None:
        return min(filter(may_go, self.resident), key=self.key, default=None)

    def key(self, item: Item) -> tuple[float, ...]:
        return (item.last_use,)


class NaiveFifo(NaiveLru):
    def key(self, item: Item) -> tuple[float, ...]:
        return (self.resident.index(item),)


class NaiveLfu(NaiveLru):
    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Item, int] = {}

    def arrive(self, item: Item) -> None:
        super().arrive(item)
        self.uses[item] = 0

    def use(self, item: Item) -> None:
        self.uses[item] += 1

    def key(self, item: Item) -> tuple[float, ...]:
        return (self.uses[item], item.last_use)


class NaiveGdsf(NaiveLfu):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0
        self.values: dict[Item, float] = {}

    def arrive(self, item: Item) -> None:
        super().arrive(item)
        self.use(item)

    def use(self, item: Item) -> None:
        super().use(item)
        self.values[item] = self.age + self.uses[item] * item.cost / item.size_bytes

    def leave(self, item: Item, *, is_evicted: bool) -> None:
        super().leave(item, is_evicted=is_evicted)
        if is_evicted:
            self.age = max(self.age, self.values[item])

    def key(self, item: Item) -> tuple[float, ...]:
        return (self.values[item], item.last_use)


class NaiveS3Fifo(NaiveLru):
    def __init__(self) -> None:
        super().__init__()
        self.small: list[Item] = []
        self.main: list[Item] = []
        self.ghosts: list[int] = []
        self.uses: dict[Item, int] = {}

    def arrive(self, item: Item) -> None:
        super().arrive(item)
        self.uses[item] = 0
        if item.ident in self.ghosts:
            self.ghosts.remove(item.ident)
            self.main.append(item)
        else:
            self.small.append(item)

    def use(self, item: Item) -> None:
        self.uses[item] = min(3, self.uses[item] + 1)

    def leave(self, item: Item, *, is_evicted: bool) -> None:
        super().leave(item, is_evicted=is_evicted)
        if item in self.main:
            self.main.remove(item)
            return
        self.small.remove(item)
        if is_evicted:
            self.ghosts.append(item.ident)
            while len(self.ghosts) > len(self.resident) + 1:
                self.ghosts.pop(0)

    def victim(self, may_go: MayGo) -> Item | None:
        in_small = sum(item.size_bytes for item in self.small)
        in_all = sum(item.size_bytes for item in self.resident)
        if in_small >= 0.1 * in_all:
            return self.from_small(may_go) or self.from_main(may_go)
        return self.from_main(may_go) or self.from_small(may_go)

    def from_small(self, may_go: MayGo) -> Item | None:
        for item in list(self.small):
            if may_go(item):
                if self.uses[item] <= 1:
                    return item
                self.small.remove(item)
                self.main.append(item)
                self.uses[item] = 0
        return None

    def from_main(self, may_go: MayGo) -> Item | None:
        while candidates := [item for item in self.main if may_go(item)]:
            item = candidates[0]
            if not self.uses[item]:
                return item
            self.main.remove(item)
            self.main.append(item)
            self.uses[item] -= 1
        return None


class NaiveArc(NaiveLru):
    def __init__(self) -> None:
        super().__init__()
        self.t1: list[Item] = []
        self.t2: list[Item] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.target = 0.0

    def arrive(self, item: Item) -> None:
        if item.ident in self.b1:
            self.target += max(1, len(self.b2) / len(self.b1))
            self.target = min(self.target, len(self.resident) + 1)
            self.b1.remove(item.ident)
            self.t2.append(item)
        elif item.ident in self.b2:
            self.target -= max(1, len(self.b1) / len(self.b2))
            self.target = max(self.target, 0)
            self.b2.remove(item.ident)
            self.t2.append(item)
        else:
            self.t1.append(item)
        super().arrive(item)

    def use(self, item: Item) -> None:
        if item in self.t1:
            self.t1.remove(item)
            self.t2.append(item)

    def leave(self, item: Item, *, is_evicted: bool) -> None:
        size = len(self.resident)
        super().leave(item, is_evicted=is_evicted)
        if is_evicted:
            (self.b1 if item in self.t1 else self.b2).append(item.ident)
        (self.t1 if item in self.t1 else self.t2).remove(item)
        while is_evicted and self.b1 and len(self.t1) + len(self.b1) > size:
            self.b1.pop(0)
        while is_evicted and len(self.b1) + len(self.b2) > size:
            (self.b2 or self.b1).pop(0)

    def victim(self, may_go: MayGo) -> Item | None:
        def oldest(items: list[Item]) -> Item | None:
            return min(filter(may_go, items), key=self.key, default=None)

        if self.t1 and len(self.t1) > self.target:
            return oldest(self.t1) or oldest(self.t2)
        return oldest(self.t2) or oldest(self.t1)


NAIVE: dict[str, type[NaiveLru]] = {
    "lru": NaiveLru,
    "prefix-lru": NaiveLru,
    "fifo": NaiveFifo,
    "lfu": NaiveLfu,
    "gdsf": NaiveGdsf,
    "s3fifo": NaiveS3Fifo,
    "arc": NaiveArc,
}
