"""The members whose state Redis does not have, because it was down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from conductor.cluster.pool_state import Kind
from kvpool.errors import StaleEpoch, Unavailable


class Unshared(set[tuple[Kind, str]]):
    """Members, by kind and id, of whom Redis missed a report: each must join again."""

    @contextlib.contextmanager
    def sharing(self, kind: Kind, member_id: str) -> Iterator[None]:
        """If the body fails, note that Redis may have missed its changes: a full report repairs it.

        Raises:
            StaleEpoch: Redis knows a newer epoch or session.
        """
        try:
            yield
        except StaleEpoch:
            raise
        except Unavailable:
            self.add((kind, member_id))
        except asyncio.CancelledError:  # the member does not wait any longer
            self.add((kind, member_id))
            raise
