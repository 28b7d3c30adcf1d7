"""Refuses, at start, ways of running vLLM that the connector does not support."""

from __future__ import annotations

from typing import Any

from kvpool.errors import ConfigError


def refuse_unsupported(vllm_config: Any) -> None:
    """Check vLLM's configuration.

    Raises:
        ConfigError: an option is not supported; the error names it.
    """
    parallel = vllm_config.parallel_config
    for option in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, option, 1) > 1:
            raise ConfigError(
                f"KVPoolConnector does not support {option}={getattr(parallel, option)}",
                hint="use tensor_parallel_size or data_parallel_size",
            )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        raise ConfigError(
            f"KVPoolConnector does not support speculative decoding by {speculative.method}: when a"
            " block is final, the drafting layers' KV of its last token is not",
            hint="ngram works",
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "KVPoolConnector does not support calculate_kv_scales: each process would compute"
            " its own scales from its first requests",
            hint="use the scales of the checkpoint",
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ConfigError(
            "KVPoolConnector does not support kv_sharing_fast_prefill: it omits some layers' KV"
        )
