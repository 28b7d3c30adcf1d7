"""A random Llama small enough that tests with it run in milliseconds, saved as a real model is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 3
KV_HEADS = 2
HEAD_DIM = 32
VOCABULARY = 512
MAX_TOKENS = 512


def save_tiny_llama(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config and weights to `directory`; the same seed gives the same bytes."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=[2, 7],
        initializer_range=0.3,  # large enough that the greedy token changes from step to step
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # `model.to` is not typed
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory)
    return directory
