"""Every message of the wire protocol, by who answers it.

A request is a tagged msgspec struct (array-like: field order is the format; only ever append fields with
defaults). `REPLIES` names the reply of each request, which has no tag of its own. Lists of hashes travel
packed (16 bytes each), lists of places as packed int64 pairs (arena id, byte offset), checksums as packed
uint64, all little-endian, so that a frame of 256 blocks costs four small objects and not a thousand.
"""

from kvpool.wire.messages.conductor import *
from kvpool.wire.messages.node import *
from kvpool.wire.messages.registry import *
from kvpool.wire.messages.types import *
from kvpool.wire.messages.worker import *
