"""A real tokenizer of a few hundred tokens, with a chat template: trained here, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "You are a careful assistant. What is a KV cache? It keeps keys and values of tokens.",
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)


def save_tiny_tokenizer(directory: Path) -> Path:
    """Byte-level BPE as of GPT-2 and Llama 3; plain prompts begin with <s>, as Llama's do."""
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    make: Any = PreTrainedTokenizerFast  # ships no types
    fast = make(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(directory))
    return directory
