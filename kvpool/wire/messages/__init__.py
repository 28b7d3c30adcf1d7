"""Every message of the wire protocol, in one file per process that answers it.

A request is a tagged msgspec struct. It is array-like: the order of the fields is the format, so
only append fields, with defaults. `REPLIES` names the reply of each request; replies have no tag.
Hashes are packed (16 bytes each), as are places (int64 pairs of arena id and byte offset) and
checksums (uint64), all little-endian. So a message about 256 blocks has four small objects and not
a thousand.
"""

from kvpool.blocks.records import *
from kvpool.wire.messages.conductor import *
from kvpool.wire.messages.node import *
from kvpool.wire.messages.registry import *
from kvpool.wire.messages.types import *
from kvpool.wire.messages.worker import *
