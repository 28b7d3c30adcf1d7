"""The size of a prompt's KV, the time to send it over a link, and whether prefill hides that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conductor.scheduling.cost_model import exposed_s
from kvpool.errors import ConfigError
from planner.sizing.hardware import Machine, NetworkLink
from planner.sizing.model_shape import ModelShape

MAX_TOKENS = 1 << 30


@dataclass(slots=True, frozen=True)
class Transfer:
    """One prompt's KV over one link.

    `exposed_s`: the part of the transfer after the prefill, if each layer is sent while the next
    ones compute. `verdict`: "masked" if a layer's transfer takes no longer than its computation, so
    that only the last layer's transfer is exposed.
    """

    link: NetworkLink
    transfer_s: float
    prefill_s: float
    exposed_s: float

    @property
    def verdict(self) -> Literal["masked", "network bound"]:
        return "masked" if self.transfer_s <= self.prefill_s else "network bound"


def transfers(
    model: ModelShape,
    tokens: int,
    kv_value_bytes: float,
    links: Sequence[NetworkLink],
    machine: Machine,
) -> list[Transfer]:
    """The prompt's KV over each link beside its prefill on `machine`."""
    size = model.kv_bytes(tokens, kv_value_bytes)
    prefill_s = machine.prefill_s(tokens)
    found = []
    for link in links:
        transfer_s = size / link.bytes_per_s
        exposed = exposed_s(prefill_s, transfer_s, model.layers)
        found.append(Transfer(link, transfer_s, prefill_s, exposed))
    return found


def size_report(
    model: ModelShape,
    tokens: int,
    dtype: str,
    kv_value_bytes: float,
    links: Sequence[NetworkLink],
    machine: Machine,
) -> dict[str, Any]:
    """The document that `kvpool plan size --json` prints.

    Raises:
        ConfigError: the number of tokens is out of range.
    """
    if not 0 < tokens <= MAX_TOKENS:
        raise ConfigError(f"--tokens {tokens} is out of range", hint=f"1 to {MAX_TOKENS}")
    rows = transfers(model, tokens, kv_value_bytes, links, machine)
    return {
        "model": model.name,
        "source": model.source,
        "tokens": tokens,
        "dtype": dtype,
        "bytes_per_token": model.bytes_per_token(kv_value_bytes),
        "kv_bytes": model.kv_bytes(tokens, kv_value_bytes),
        "window_tokens": model.smallest_window,
        "parameters": model.total_params,
        "active_parameters": model.active_params,
        "machine": {
            "gpu": machine.gpu.name,
            "tp": machine.tp,
            "source": machine.gpu.source,
            "mfu": machine.mfu,
            "prefill_s": machine.prefill_s(tokens),
            "kv_capacity_tokens": machine.kv_capacity_tokens,
        },
        "links": [
            {
                "link": row.link.name,
                "gbytes_per_s": row.link.bytes_per_s / 1e9,
                "transfer_s": row.transfer_s,
                "prefill_s": row.prefill_s,
                "exposed_s": row.exposed_s,
                "verdict": row.verdict,
            }
            for row in rows
        ],
    }
