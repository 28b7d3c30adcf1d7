"""Cutting a node's blocks into runs of chains: all of them, once, parents first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.service.drain import RUN_BLOCKS, cut_into_runs


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


@given(st.lists(st.integers(-1, 60), max_size=60))
def test_every_block_is_in_one_run_after_its_parent(links: list[int]) -> None:
    # Block i follows block links[i] if that is an earlier one; else its parent is not here.
    parents = {name(i): name(p) if 0 <= p < i else b"gone" * 4 for i, p in enumerate(links)}
    seen: list[bytes] = []
    for run in cut_into_runs(parents):
        before = run.parent
        for block in run.hashes:
            assert parents[block] == before
            assert before not in parents or before in seen
            seen.append(block)
            before = block
    assert sorted(seen) == sorted(parents)


def test_a_long_chain_is_cut_and_a_branch_begins_its_own_run() -> None:
    count = RUN_BLOCKS + 5
    parents = {name(i): name(i - 1) if i else b"" for i in range(count)}
    parents[name(count)] = name(3)  # a second child of block 3
    runs = list(cut_into_runs(parents))
    assert [len(run.hashes) for run in runs] in ([RUN_BLOCKS, 5, 1], [4, 1, RUN_BLOCKS, 1])
    assert {run.parent for run in runs} >= {b"", name(3)}
