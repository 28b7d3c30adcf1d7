"""Options of one request: `"kv_transfer_params": {"kvpool": {"load": false, "save": false}}`."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

log = structlog.get_logger(__name__)


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a request may read blocks from the pool, and store its blocks there."""

    load: bool = True
    save: bool = True


def options_of(request: Any) -> RequestOptions:
    """The options of vLLM's `Request`.

    If they are invalid, the request shares nothing, to be safe.
    """
    given = (request.kv_transfer_params or {}).get("kvpool")
    if given is None:
        return RequestOptions()
    try:
        return msgspec.convert(given, RequestOptions)
    except msgspec.ValidationError as error:
        log.warning(
            "a request shares nothing: kv_transfer_params.kvpool takes booleans load and save",
            request=request.request_id,
            error=str(error),
        )
        return RequestOptions(load=False, save=False)
