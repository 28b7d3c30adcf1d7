"""KV memory that is paged in before it is used."""

from __future__ import annotations

import mmap
import resource

import pytest
import torch

from kvpool.engines.vllm.prefault import Prefault

SIZE = 64 << 20


def region(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.nbytes


def faults_of_writing(memory: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.fill_(7)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_is_paged_in_with_its_content_as_it_was() -> None:
    used, fresh = torch.arange(SIZE // 8), torch.empty(SIZE, dtype=torch.uint8)
    prefault = Prefault([region(used), region(fresh)])
    prefault.wait(30)
    prefault.close()
    if not prefault.touched_bytes:
        pytest.skip("this kernel cannot page memory in on demand (Linux 5.14 can)")
    assert 2 * SIZE - 4 * mmap.PAGESIZE <= prefault.touched_bytes <= 2 * SIZE
    assert torch.equal(used, torch.arange(SIZE // 8))
    assert faults_of_writing(fresh) < SIZE // mmap.PAGESIZE // 8
    assert faults_of_writing(torch.empty(SIZE, dtype=torch.uint8)) > SIZE // mmap.PAGESIZE // 8


def test_memory_that_cannot_be_paged_in_is_left_alone() -> None:
    nowhere = 1 << 46
    prefault = Prefault([(nowhere, SIZE)])
    prefault.wait(30)
    prefault.close()
    assert prefault.touched_bytes == 0
