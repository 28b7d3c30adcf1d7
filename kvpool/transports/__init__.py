"""How bytes move: shared memory on the same host, NIXL elsewhere, behind one interface."""

from kvpool.transports.base import Pieces, Transport
from kvpool.transports.select import TransportName, Transports

__all__ = ["Pieces", "Transport", "TransportName", "Transports"]
