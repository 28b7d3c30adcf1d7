"""The one tree of errors that kvpool raises.

Every error says what happened, to which thing, and what to do about it. `code` is stable and
travels over the wire, so that a client raises the same type that a server raised; `retryable` says
whether the same call may succeed later without a change by the caller.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import ClassVar


class KvpoolError(Exception):
    """Base of all errors of kvpool.

    Args:
        message: what happened, to which thing.
        hint: what the reader can do about it; appended to the text.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class InvalidArgument(KvpoolError):
    """The caller passed something that can never work: wrong type, size, count or value."""

    code = "invalid_argument"
    http_status = 400


class ConfigError(KvpoolError):
    """A configuration value is missing, unknown or contradictory."""

    code = "config"
    http_status = 400


class UnsupportedLayout(ConfigError):
    """An engine's KV cache is arranged in an unknown way, so none of it may be shared."""

    code = "unsupported_layout"


class LayoutMismatch(InvalidArgument):
    """A namespace has another layout already. Blocks of two layouts must never mix."""

    code = "layout_mismatch"
    http_status = 409


class HashMismatch(InvalidArgument):
    """A peer computes other block hashes, so neither would find the other's blocks."""

    code = "hash_mismatch"
    http_status = 409


class CannotReshard(InvalidArgument):
    """Blocks stored for one tensor-parallel size cannot be used with another one."""

    code = "cannot_reshard"
    http_status = 409


class UnverifiableRead(InvalidArgument):
    """Checksums cover whole parts, and this transport reads less than a part."""

    code = "unverifiable_read"


class Unauthenticated(KvpoolError):
    """The server asks for a token, and the caller sent none that it knows."""

    code = "unauthenticated"
    http_status = 401


class Forbidden(KvpoolError):
    """The token is known, but does not allow this call."""

    code = "forbidden"
    http_status = 403


# Errors of tokens: trying again helps only after a token was changed.
REFUSALS = (Unauthenticated, Forbidden)


class UnknownNamespace(InvalidArgument):
    """The namespace was never registered at this server (it may have restarted since)."""

    code = "unknown_namespace"
    http_status = 404


class BlockTooLarge(InvalidArgument):
    """A part of a block is larger than the largest slot of the server."""

    code = "block_too_large"
    http_status = 413


class WrongByteCount(InvalidArgument):
    """A buffer does not have the size that the layout gives."""

    code = "wrong_byte_count"


class NotFound(KvpoolError):
    """A named thing (request, node, worker, model) does not exist."""

    code = "not_found"
    http_status = 404


class ModelNotFound(NotFound):
    """The model's files are not in the configured place."""

    code = "model_not_found"


class BlockMiss(KvpoolError):
    """A block that the call needs is not in the pool. The pool may miss any block at any time."""

    code = "miss"
    http_status = 404


class ChecksumMismatch(BlockMiss):
    """The bytes read differ from those committed. The block was dropped and counts as a miss."""

    code = "checksum"


class LeaseExpired(KvpoolError):
    """The lease ended before the read, so the bytes were discarded (invariant 3)."""

    code = "lease_expired"
    retryable = True
    http_status = 409


class ReservationGone(KvpoolError):
    """The reservation was committed or aborted, or has expired."""

    code = "reservation_gone"
    http_status = 409


class NoRoom(KvpoolError):
    """No slot can be freed now: all are pinned, reserved or quarantined, or a limit is reached."""

    code = "no_room"
    retryable = True
    http_status = 507


class Overloaded(KvpoolError):
    """The request was refused early, because no choice of workers would meet its objectives."""

    code = "overloaded"
    retryable = True
    http_status = 429

    def __init__(
        self, message: str, *, hint: str = "", retry_after_s: float = 1.0, reason: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
        self.reason = reason  # for programs: one word


class DeadlineExceeded(KvpoolError):
    """The call did not end within its deadline. Its effect, if any, is void or harmless."""

    code = "deadline"
    retryable = True
    http_status = 504


class Unavailable(KvpoolError):
    """The peer cannot be reached, went away in mid-call, or is draining."""

    code = "unavailable"
    retryable = True
    http_status = 503


class Draining(Unavailable):
    """The node is about to stop and takes no new blocks. Use another node."""

    code = "draining"


class TransferFailed(Unavailable):
    """A transport could not move the bytes."""

    code = "transfer_failed"


class NoTransport(Unavailable):
    """None of the transports that this process may use reaches the node.

    Other processes may reach it.
    """

    code = "no_transport"
    retryable = False


class StaleEpoch(Unavailable):
    """The call names an older epoch of the peer, which has restarted."""

    code = "stale_epoch"


class ProtocolError(KvpoolError):
    """A frame is malformed, too large, or of an unknown kind; the connection is closed."""

    code = "protocol"
    http_status = 400


class PortInUse(ConfigError):
    """A configured address is taken by another process."""

    code = "port_in_use"


class NoSharedMemory(ConfigError):
    """The machine does not have the shared memory for the arena."""

    code = "no_shared_memory"


class EngineFailed(KvpoolError):
    """The model engine of a worker failed on this request."""

    code = "engine_failed"
    retryable = True


def brief(value: object, limit: int = 200) -> str:
    """`value` as text of at most `limit` characters, for messages that quote what a caller sent."""
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: object, known: Collection[str]) -> str:
    """The hint for a name that is not among `known`: the nearest of them, otherwise all."""
    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


def _tree(root: type[KvpoolError]) -> dict[str, type[KvpoolError]]:
    found = {root.code: root}
    for sub in root.__subclasses__():
        found.update(_tree(sub))
    return found


BY_CODE: dict[str, type[KvpoolError]] = _tree(KvpoolError)


def from_code(code: str, message: str) -> KvpoolError:
    """Rebuild the error that a peer raised; an unknown code gives a plain `KvpoolError`."""
    return BY_CODE.get(code, KvpoolError)(message)
