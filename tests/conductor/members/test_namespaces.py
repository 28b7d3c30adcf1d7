"""Known namespaces: one layout per owner, bounded, in pages, at a cost that does not grow."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from conductor.members.namespaces import KnownNamespaces
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import InvalidArgument, LayoutMismatch

LAYOUT = Layout("bfloat16", 2, 2, 8)
OTHER = Layout("float16", 2, 2, 8)


def namespace(salt: str, layout: Layout = LAYOUT) -> Namespace:
    return Namespace("m", "r", layout, "tenant", salt)


def test_another_layout_of_the_same_owner_is_refused_and_named() -> None:
    known = KnownNamespaces()
    known.add(namespace("a"))
    known.add(namespace("b", OTHER))
    with pytest.raises(LayoutMismatch, match="dtype: bfloat16 != float16"):
        known.add(namespace("a", OTHER))
    both = msgspec.structs.replace(namespace("a"), hash_algorithm="sha256")
    assert known.add(both) != known.add(namespace("a"))
    with pytest.raises(LayoutMismatch):
        known.add(msgspec.structs.replace(both, layout=OTHER))


def test_the_oldest_is_forgotten_together_with_its_layout() -> None:
    known = KnownNamespaces(2)
    first = known.add(namespace("a"))
    known.add(namespace("b"))
    known.add(namespace("c"))
    assert len(known) == 2
    assert first not in known
    known.add(namespace("a", OTHER))


def test_adding_costs_the_same_however_many_are_known() -> None:
    def steps(known: KnownNamespaces, one: Namespace) -> int:
        """Lines of Python run by `add`."""
        count = 0

        def trace(_frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            known.add(one)
        finally:
            sys.settrace(None)
        return count

    few, many = KnownNamespaces(), KnownNamespaces()
    for number in range(300):
        many.add(namespace(str(number)))
    few.add(namespace("0"))
    assert steps(many, namespace("new")) == steps(few, namespace("new"))


def test_pages_cover_all_and_have_bounds() -> None:
    known = KnownNamespaces()
    for number in range(25):
        known.add(namespace(str(number)))
    pages = [known.page(offset, 10) for offset in (0, 10, 20, 30)]
    assert [len(page) for page in pages] == [10, 10, 5, 0]
    assert [one.salt for page in pages for one in page] == [str(n) for n in range(25)]
    assert known.page(2**63, 10) == []  # a frame can carry it
    for offset, limit in ((-1, 10), (0, 0), (0, 10_001)):
        with pytest.raises(InvalidArgument):
            known.page(offset, limit)
