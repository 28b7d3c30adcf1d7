"""Compares, by prompt length, the TTFT that a transfer adds with the interference that a remote prefill removes.

In coupled serving a prompt is computed in chunks, each beside one token of every decoding sequence.
In disaggregated serving it is computed alone; then the exposed part of the transfer and the load
are added. Closed forms over a machine's profile; the simulator also has queues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.scheduling.cost_model import Profile, exposed_s
from planner.sizing.hardware import GPU_COPY_BYTES_PER_S, Machine, NetworkLink

LEAST, MOST = 1e6, 1e13  # bytes per second between which a crossover is searched


@dataclass(slots=True, frozen=True)
class Crossover:
    """One prompt length over one link."""

    prompt_tokens: int
    link: str
    coupled_s: float  # TTFT without a queue, beside the batch
    apart_s: float  # TTFT with a remote prefill
    transfer_s: float  # part of `apart_s`: the exposed part of the transfer, and the load
    interference_s: float  # removed by the remote prefill
    slowed_s: float  # delay of each sequence of the batch in coupled serving

    @property
    def is_worth_it(self) -> bool:
        return self.transfer_s < self.interference_s


def coupled_s(cost: Profile, tokens: int, batch: int, context: int, chunk_tokens: int) -> float:
    """TTFT of a prompt computed in chunks beside `batch` sequences of `context` tokens each."""
    budget = max(64, chunk_tokens - batch)
    steps = math.ceil(tokens / budget)
    beside_s = cost.tpot_context_s * batch * context + cost.tpot_sequence_s * batch
    total, done = 0.0, 0
    for _ in range(steps):
        count = min(budget, tokens - done)
        compute_s = max(cost.prefill_base_s + cost.prefill_token_s * count, cost.tpot_base_s)
        total += compute_s + cost.prefill_attention_s * count * (done + count / 2) + beside_s
        done += count
    return total


def crossover(
    machine: Machine,
    link: NetworkLink,
    tokens: int,
    *,
    batch: int = 32,
    context: int = 4096,
    chunk_tokens: int = 2048,
) -> Crossover:
    """One point: a prompt of `tokens` beside a batch, and the same prompt prefilled elsewhere."""
    cost = machine.profile()
    size = machine.model.kv_bytes(tokens, machine.kv_value_bytes)
    alone_s = machine.prefill_s(tokens)
    together_s = coupled_s(cost, tokens, batch, context, chunk_tokens)
    sent_s = exposed_s(alone_s, size / link.bytes_per_s, machine.model.layers)
    transfer_s = sent_s + size / (GPU_COPY_BYTES_PER_S * machine.tp)
    steps = math.ceil(tokens / max(64, chunk_tokens - batch))
    decode_s = cost.tpot_s(context * batch, batch)
    return Crossover(
        tokens,
        link.name,
        together_s,
        alone_s + transfer_s,
        transfer_s,
        together_s - alone_s,
        together_s - steps * decode_s,
    )


def least_bandwidth(machine: Machine, tokens: int, **beside: int) -> float | None:
    """The least bytes per second with which a remote prefill gives the better TTFT; None: no link suffices."""
    low, high = LEAST, MOST
    if not crossover(machine, NetworkLink("", high), tokens, **beside).is_worth_it:
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if crossover(machine, NetworkLink("", middle), tokens, **beside).is_worth_it:
            high = middle
        else:
            low = middle
    return high


def curve(
    machine: Machine, links: Sequence[NetworkLink], lengths: Sequence[int], **beside: int
) -> list[Crossover]:
    """Compare every length over every link."""
    return [crossover(machine, link, tokens, **beside) for tokens in lengths for link in links]
