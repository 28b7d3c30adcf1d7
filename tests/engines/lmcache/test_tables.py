"""Locks, the object table and task results, without a pool."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engines.lmcache.keys import Item, Space
from kvpool.engines.lmcache.locks import LockTable
from kvpool.engines.lmcache.object_table import ObjectTable
from kvpool.engines.lmcache.task_results import TaskResults

A, B, C = b"a", b"b", b"c"


def test_a_lease_goes_when_its_last_object_is_unlocked() -> None:
    table: LockTable[str] = LockTable()
    table.lock([A, B], "one", 10.0)
    assert table.unlock([A]) == []
    assert len(table) == 1
    assert table.unlock([B]) == ["one"]
    assert len(table) == 0


def test_locks_count_and_the_oldest_lease_goes_first() -> None:
    table: LockTable[str] = LockTable()
    table.lock([A, B], "one", 10.0)
    table.lock([A], "two", 20.0)
    assert table.unlock([A]) == []  # of "one", which still holds B
    assert table.unlock([A]) == ["two"]
    assert table.unlock([A]) == []
    assert table.unlock([C, B]) == ["one"]


def test_one_lookup_that_names_an_object_twice_locks_it_twice() -> None:
    table: LockTable[str] = LockTable()
    table.lock([A, A], "one", 10.0)
    assert table.unlock([A]) == []
    assert table.unlock([A]) == ["one"]


def test_old_groups_expire_and_unlocking_them_afterwards_does_nothing() -> None:
    table: LockTable[str] = LockTable()
    table.lock([A, B], "one", 10.0)
    table.lock([B, C], "two", 20.0)
    table.unlock([A])
    assert table.expire(9.9) == []
    assert table.expire(10.0) == ["one"]
    assert table.is_locked(B)
    assert not table.is_locked(A)
    assert table.unlock([A, B, B, C]) == ["two"]
    assert table.expire(99.0) == []


def test_a_group_whose_lease_was_lost_is_forgotten_once() -> None:
    table: LockTable[str] = LockTable()
    group = table.lock([A], "one", 10.0)
    table.lock([A], "two", 10.0)
    table.drop(group)
    table.drop(group)
    assert [g.lease for g in table.groups()] == ["two"]
    assert table.unlock([A]) == ["two"]


def item(name: bytes) -> Item:
    namespace: Any = SimpleNamespace()
    return Item(Space(namespace, bytes(16), b""), name, b"")


def key(model: str = "m") -> Any:
    return SimpleNamespace(model_name=model)


def test_the_object_table_forgets_the_oldest_beyond_its_limit() -> None:
    object_table = ObjectTable(2)
    new, forgotten = object_table.add([(key(), item(bytes([n])), n) for n in range(3)], 0.0)
    assert [entry.size_bytes for entry in new] == [0, 1, 2]
    assert [entry.size_bytes for entry in forgotten] == [0]
    assert len(object_table) == 2
    assert object_table.add([(key(), item(b"\x01"), 1)], 1.0) == ([], [])


def test_pages_go_on_behind_the_cursor_whatever_was_removed() -> None:
    object_table = ObjectTable(10)
    object_table.add([(key("ab"[n % 2]), item(bytes([n])), n) for n in range(6)], 0.0)
    first = object_table.page(0, 2, None)
    assert [entry.size_bytes for entry in first] == [0, 1]
    object_table.remove([item(b"\x01"), item(b"\x02")])
    assert [e.size_bytes for e in object_table.page(first[-1].number, 9, None)] == [3, 4, 5]
    assert [e.size_bytes for e in object_table.page(0, 9, "a")] == [0, 4]


def test_what_was_added_just_now_is_not_removed_for_not_being_found_yet() -> None:
    object_table = ObjectTable(10)
    object_table.add([(key(), item(b"old"), 1)], 0.0)
    object_table.add([(key(), item(b"new"), 2)], 8.0)
    gone = object_table.remove([item(b"old"), item(b"new")], added_before=5.0)
    assert [entry.size_bytes for entry in gone] == [1]
    assert len(object_table) == 1


def test_an_outbox_signals_each_result_once_and_gives_it_once() -> None:
    task_results: TaskResults[str] = TaskResults()
    task_results.put(1, "one")
    task_results.put(2, "two")
    assert os.eventfd_read(task_results.fd) == 2
    with pytest.raises(BlockingIOError):
        os.eventfd_read(task_results.fd)
    assert task_results.take(1) == "one"
    assert task_results.take(1) is None
    assert task_results.take_all() == {2: "two"}
    assert task_results.take_all() == {}
    task_results.close()
    task_results.close()
    task_results.put(3, "late")
    assert task_results.take(3) == "late"
