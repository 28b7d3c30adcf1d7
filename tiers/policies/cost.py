"""How much prefill time a block saves, estimated from its place in the chain."""

from __future__ import annotations

CONTEXT_TOKENS = 8192  # attention to so much context costs as much as the rest: 7B models, roughly


def prefill_cost(depth: int, block_tokens: int, context_tokens: int = CONTEXT_TOKENS) -> float:
    """Cost of computing block number `depth` of a chain, in units of one token without context.

    Linear in its tokens and in their attention to all tokens before them. Policies use ratios only.

    Args:
        depth: blocks before this one.
        block_tokens: tokens of a block.
        context_tokens: length of context at which attention doubles the cost of a token.
    """
    return block_tokens * (1.0 + (depth + 0.5) * block_tokens / context_tokens)
