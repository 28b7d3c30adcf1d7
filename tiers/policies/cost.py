"""How much prefill time a block saves, as far as its place in the chain tells."""

from __future__ import annotations

CONTEXT_TOKENS = (
    8192  # where attention to the context costs as much as the rest; 7B models, roughly
)


def prefill_cost(depth: int, block_tokens: int, context_tokens: int = CONTEXT_TOKENS) -> float:
    """Cost of computing block number `depth` of a chain, in units of one token without context.

    Linear in its tokens, and in their attention to all before them. Only ratios matter to a policy.

    Args:
        depth: blocks before this one.
        block_tokens: tokens of a block.
        context_tokens: length of context at which attention doubles the cost of a token.
    """
    return block_tokens * (1.0 + (depth + 0.5) * block_tokens / context_tokens)
