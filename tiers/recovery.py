"""Taking in what a restarted node finds in its NVMe files. Pure: the files are read elsewhere."""

from __future__ import annotations

from tiers.blocks import NVME, Space
from tiers.quantise import Encoding
from tiers.residency import Residency
from tiers.slots import Place


def recover_part(
    residency: Residency,
    space: Space,
    block_hash: bytes,
    parent: bytes,
    part: int,
    place: Place,
    checksum: int,
    encoding: Encoding,
) -> bool:
    """Enter one part at its place in nvme; False when the place or the part is taken or impossible.

    Parts of one block that are encoded in different ways do not make a block.
    """
    if NVME not in residency.tiers or not 0 <= part < space.tp_size:
        return False
    block = residency.block(space, block_hash, parent)
    copy = block.copies[NVME]
    is_known = any(other is not None and other is not copy for other in block.copies) or (
        copy is not None and (copy.places[part] is not None or copy.encoding != encoding)
    )
    if is_known or not residency.claim(block, NVME, part, place, encoding):
        residency.forget_if_gone(block)
        return False
    copy = block.copies[NVME]
    if copy is not None and residency.fill(copy, part, checksum):
        residency.counters["recovered"] += 1
    return True


def discard_partial(residency: Residency) -> list[tuple[bytes, bytes]]:
    """Free the blocks that were recovered in part only; returns (namespace id, hash) of each."""
    partial: list[tuple[bytes, bytes]] = []
    for space in residency.spaces.values():
        for block in list(space.blocks.values()):
            copy = block.copies[NVME]
            if copy is not None and copy.committed and not copy.is_whole and not copy.filling:
                partial.append((space.namespace_id, block.name))
                residency.discard_partial(copy)
    return partial
