"""The transformers engine: blocks are loaded and exported unchanged, and reuse never changes an output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout
from kvpool.errors import (
    ConfigError,
    EngineFailed,
    InvalidArgument,
    ModelNotFound,
    TransferFailed,
    WrongByteCount,
)
from kvpool.wire.messages import Sampling
from tests.support.tiny_model import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MAX_TOKENS,
    VOCABULARY,
    save_tiny_llama,
)
from workers.engine import transformers_engine
from workers.engine.contract import Bytes, Engine, LayerChunk, SequenceState, Tokens
from workers.engine.model_files import default_cache_dir, prepare_model
from workers.engine.prefix_cache import LocalPrefixCache
from workers.engine.sampling import draw
from workers.engine.transformers_engine import TransformersEngine

BLOCK = 16
GREEDY = Sampling(max_tokens=8)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: several threads that wait for each other are slow if cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(model_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return TransformersEngine(model_dir, block_tokens=BLOCK, dtype=request.param)


def prompt_of(tokens: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens)


def greedy(engine: Engine, sequence: SequenceState, steps: int = 8) -> list[int]:
    tokens = []
    for _ in range(steps):
        tokens.append(engine.next_token(sequence, GREEDY))
        engine.decode(sequence, tokens[-1])
    return tokens


def prefilled(engine: Engine, prompt: Tokens, chunk_tokens: int = 0) -> SequenceState:
    sequence = engine.start(prompt, 8)
    engine.prefill(sequence, chunk_tokens=chunk_tokens)
    return sequence


# ---------------------------------------------------------------- what the engine is


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_layout_namespace_and_limits_come_from_the_model_and_the_cpu(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, dtype: str
) -> None:
    monkeypatch.setattr(transformers_engine, "_is_fast_on_cpu", lambda _: has_bfloat16)
    engine = TransformersEngine(model_dir, model_name="tiny", block_tokens=BLOCK)
    assert engine.layout == Layout(dtype, LAYERS, KV_HEADS, HEAD_DIM, BLOCK)
    assert engine.max_model_tokens == MAX_TOKENS
    assert engine.eos_token_ids == {2, 7}
    mine = engine.namespace(tenant="a", salt="s", hash_algorithm="sha256")
    assert (mine.model, mine.revision, mine.tenant) == ("tiny", engine.revision, "a")
    assert mine.layout == engine.layout
    assert mine.namespace_id != engine.namespace().namespace_id


def test_other_weights_make_another_namespace(model_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "tiny", seed=1)
    one = TransformersEngine(model_dir, model_name="tiny")
    two = TransformersEngine(other, model_name="tiny")
    assert one.namespace().namespace_id != two.namespace().namespace_id


# ---------------------------------------------------------------- the cache against transformers' own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[50], [16, 34], [1, 20, 29]])
def test_logits_equal_those_of_transformers_own_cache(
    model_dir: Path, dtype: torch.dtype, chunks: list[int]
) -> None:
    prompt = prompt_of(50)
    engine = TransformersEngine(model_dir, block_tokens=BLOCK, dtype=str(dtype).split(".")[1])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    theirs = DynamicCache(config=model.config)
    # the engine makes equal chunks, so unequal ones go through the cache itself
    sequence = engine.start(prompt, 20)
    ours = sequence.cache  # type: ignore[attr-defined]
    edges = np.cumsum([0, *chunks]).tolist()
    pieces = [prompt[a:b] for a, b in pairwise(edges)]
    pieces += [prompt_of(1, seed) for seed in range(20)]
    with torch.inference_mode():
        for piece in pieces:
            ids = torch.from_numpy(piece)[None]
            expected = model(input_ids=ids, cache=theirs).logits
            assert torch.equal(model(input_ids=ids, cache=ours).logits, expected)
    assert ours.get_seq_length() == theirs.get_seq_length() == 70
    their_keys = getattr(theirs.layers[1], "keys")  # noqa: B009 (the union's other types lack it)
    assert torch.equal(ours.layers[1].keys[:, :, :70], their_keys)


def test_whole_generation_equals_transformers_generate(model_dir: Path) -> None:
    prompt = prompt_of(40)
    engine = TransformersEngine(model_dir, block_tokens=BLOCK, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    theirs = model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=8, do_sample=False, eos_token_id=VOCABULARY
    )
    assert greedy(engine, prefilled(engine, prompt)) == theirs[0, 40:].tolist()


# ---------------------------------------------------------------- blocks out


def test_exported_blocks_have_the_pools_order(engine: Engine) -> None:
    sequence = prefilled(engine, prompt_of(40))
    blocks = engine.export_blocks(sequence, 0, 2)
    dtype = torch.float32 if engine.layout.dtype == "float32" else torch.bfloat16
    parts = torch.from_numpy(blocks).view(dtype).view(2, *engine.layout.part_shape)
    for layer in range(LAYERS):
        for kv, name in enumerate(("keys", "values")):
            states = getattr(sequence.cache.layers[layer], name)[0]  # type: ignore[attr-defined]
            for block in range(2):
                expected = states[:, block * BLOCK : (block + 1) * BLOCK]
                assert torch.equal(parts[block, layer, kv], expected)


@pytest.mark.parametrize(
    ("tokens", "loaded", "chunk_tokens"),
    [(100, 0, 0), (100, 0, 24), (100, 0, 7), (96, 2, 0), (100, 2, 33), (33, 2, 0), (100, 0, 1000)],
)
def test_layer_chunks_cover_each_new_block_once_and_equal_the_export(
    engine: Engine, tokens: int, loaded: int, chunk_tokens: int
) -> None:
    prompt = prompt_of(tokens)
    whole = tokens // BLOCK
    sequence = engine.start(prompt, 0)
    if loaded:
        engine.load_prefix(sequence, engine.export_blocks(prefilled(engine, prompt), 0, loaded))
    parts = np.zeros((whole, LAYERS, engine.layout.layer_bytes), np.uint8)
    seen = np.zeros((whole, LAYERS), int)

    def on_layer(chunk: LayerChunk) -> None:
        rows = slice(chunk.first_block, chunk.first_block + len(chunk.blocks))
        assert chunk.blocks.shape[1] == engine.layout.layer_bytes
        parts[rows, chunk.layer] = chunk.blocks
        seen[rows, chunk.layer] += 1

    engine.prefill(sequence, on_layer, chunk_tokens)
    assert (seen[:loaded] == 0).all()
    assert (seen[loaded:] == 1).all()
    exported = engine.export_blocks(sequence, loaded, whole - loaded)
    assert np.array_equal(parts[loaded:].reshape(exported.shape), exported)


def test_layers_are_handed_out_before_later_layers_compute(engine: Engine) -> None:
    sequence = engine.start(prompt_of(40), 0)
    lengths: list[tuple[int, list[int]]] = []

    def on_layer(chunk: LayerChunk) -> None:
        layers = sequence.cache.layers  # type: ignore[attr-defined]
        lengths.append((chunk.layer, [layer.get_seq_length() for layer in layers]))

    engine.prefill(sequence, on_layer)
    assert lengths == [(0, [40, 0, 0]), (1, [40, 40, 0]), (2, [40, 40, 40])]


def test_chunks_handed_out_stay_as_they_were(engine: Engine) -> None:
    kept: list[Bytes] = []
    copies: list[Bytes] = []

    def on_layer(chunk: LayerChunk) -> None:
        kept.append(chunk.blocks)
        copies.append(chunk.blocks.copy())

    sequence = engine.start(prompt_of(64), 8)
    engine.prefill(sequence, on_layer, chunk_tokens=20)
    greedy(engine, sequence)
    engine.close(sequence)
    engine.prefill(engine.start(prompt_of(64, seed=9), 0))
    assert len(kept) > LAYERS
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_decoded_tokens_complete_blocks_that_can_be_exported(engine: Engine) -> None:
    prompt = prompt_of(44)
    sequence = prefilled(engine, prompt)
    with pytest.raises(InvalidArgument, match="2 are whole"):
        engine.export_blocks(sequence, 2, 1)
    tokens = greedy(engine, sequence, steps=4)
    assert sequence.generated == tokens
    block = engine.export_blocks(sequence, 2, 1)
    again = engine.start(np.concatenate([prompt, tokens]), 0)
    engine.load_prefix(again, engine.export_blocks(sequence, 0, 3))
    engine.prefill(again)
    assert block.any()
    assert again.computed_tokens == 1


# ---------------------------------------------------------------- blocks in


def test_bytes_loaded_are_the_bytes_exported(engine: Engine) -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (3, engine.layout.part_bytes), np.uint8)
    sequence = engine.start(prompt_of(60), 0)
    engine.load_prefix(sequence, blocks)
    assert np.array_equal(engine.export_blocks(sequence, 0, 3), blocks)
    assert np.array_equal(engine.export_blocks(sequence, 1, 1), blocks[1:2])


def test_blocks_may_be_read_only_strided_and_unaligned(engine: Engine) -> None:
    part = engine.layout.part_bytes
    slots = np.random.default_rng(3).integers(0, 256, 1 + 2 * (part + 4096), np.uint8)
    blocks = slots[1:].reshape(2, part + 4096)[:, :part]
    blocks.flags.writeable = False
    sequence = engine.start(prompt_of(60), 0)
    engine.load_prefix(sequence, blocks)
    assert np.array_equal(engine.export_blocks(sequence, 0, 2), blocks)


@pytest.mark.parametrize(("tokens", "split"), [(100, 5), (96, 6), (100, 1), (33, 2)])
def test_pool_hit_answers_exactly_as_a_local_hit_of_the_same_split(
    engine: Engine, tokens: int, split: int
) -> None:
    prompt = prompt_of(tokens)
    cold = prefilled(engine, prompt, chunk_tokens=split * BLOCK)
    blocks = engine.export_blocks(cold, 0, tokens // BLOCK)
    hashes = hash_chain(engine.namespace(), prompt)
    local = LocalPrefixCache(1024, BLOCK)
    local.insert(hashes, blocks)

    by_local = engine.start(prompt, 8)
    found = local.match(hashes[:split])
    assert found is not None
    engine.load_prefix(by_local, found)
    engine.prefill(by_local)
    by_pool = engine.start(prompt, 8)
    engine.load_prefix(by_pool, blocks[:split].copy())
    engine.prefill(by_pool)

    assert by_pool.loaded_tokens == min(split * BLOCK, tokens - 1)
    assert by_pool.computed_tokens == tokens - by_pool.loaded_tokens
    whole = tokens // BLOCK
    assert np.array_equal(
        engine.export_blocks(by_pool, 0, whole), engine.export_blocks(by_local, 0, whole)
    )
    answer = greedy(engine, by_pool)
    assert answer == greedy(engine, by_local)
    if split * BLOCK < tokens:  # a whole-prompt hit recomputes one token: another cut than cold's
        assert answer == greedy(engine, cold)
    assert len(set(answer)) > 1


def test_loaded_kv_is_really_used(engine: Engine) -> None:
    """Wrong KV must give another output; otherwise the equality tests above could not fail."""
    prompt = prompt_of(100)
    honest = prefilled(engine, prompt)
    wrong = engine.start(prompt, 8)
    others = prefilled(engine, prompt_of(100, seed=7))
    engine.load_prefix(wrong, engine.export_blocks(others, 0, 6))
    engine.prefill(wrong)
    assert greedy(engine, wrong) != greedy(engine, honest)


def test_float32_answers_do_not_depend_on_reuse_at_all(model_dir: Path) -> None:
    engine = TransformersEngine(model_dir, block_tokens=BLOCK, dtype="float32")
    prompt = prompt_of(100)
    cold = prefilled(engine, prompt)
    blocks = engine.export_blocks(cold, 0, 6)
    expected = greedy(engine, cold)
    for split in range(1, 7):
        warm = engine.start(prompt, 8)
        engine.load_prefix(warm, blocks[:split])
        engine.prefill(warm)
        assert greedy(engine, warm) == expected


def test_hit_on_the_whole_prompt_computes_its_last_token_only(engine: Engine) -> None:
    prompt = prompt_of(64)
    blocks = engine.export_blocks(prefilled(engine, prompt), 0, 4)
    sequence = engine.start(prompt, 1)
    engine.load_prefix(sequence, blocks)
    assert sequence.loaded_tokens == 63
    chunks: list[LayerChunk] = []
    engine.prefill(sequence, chunks.append)
    assert sequence.computed_tokens == 1
    assert chunks == []
    engine.next_token(sequence, GREEDY)


# ---------------------------------------------------------------- sampling


def test_sampling_is_repeatable_and_differs_by_seed_and_position(engine: Engine) -> None:
    sequence = prefilled(engine, prompt_of(40))

    def draws(temperature: float, top_p: float = 1.0) -> list[int]:
        return [
            engine.next_token(sequence, Sampling(1, temperature, top_p, seed)) for seed in range(32)
        ]

    hot = draws(5.0)
    assert hot == draws(5.0)
    assert len(set(hot)) > 4
    best = engine.next_token(sequence, GREEDY)
    assert set(draws(5.0, top_p=1e-6)) == {best}
    assert set(draws(1e-30)) == {best}
    engine.decode(sequence, best)
    assert draws(5.0) != hot


def test_draws_are_independent_from_position_to_position() -> None:
    flat = torch.zeros(VOCABULARY)
    by_position = [draw(flat, Sampling(1, 1.0, seed=5), position=p) for p in range(64)]
    by_seed = [draw(flat, Sampling(1, 1.0, seed=s), position=5) for s in range(64)]
    assert len(set(by_position)) > 48
    assert len(set(by_seed)) > 48
    assert by_position != by_seed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=-1.0),
        Sampling(1, temperature=float("nan")),
        Sampling(1, temperature=1.0, top_p=0.0),
        Sampling(1, temperature=1.0, top_p=1.1),
    ],
)
def test_invalid_sampling_is_refused(engine: Engine, sampling: Sampling) -> None:
    sequence = prefilled(engine, prompt_of(20))
    with pytest.raises(InvalidArgument):
        engine.next_token(sequence, sampling)


# ---------------------------------------------------------------- errors


def test_prompts_that_cannot_work_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        engine.start(np.array([], np.int64), 1)
    with pytest.raises(InvalidArgument, match=str(MAX_TOKENS)):
        engine.start(prompt_of(MAX_TOKENS + 1), 0)
    with pytest.raises(InvalidArgument, match=str(MAX_TOKENS)):
        engine.start(prompt_of(MAX_TOKENS), 1)
    engine.close(engine.start(prompt_of(MAX_TOKENS), 0))
    with pytest.raises(InvalidArgument, match=str(VOCABULARY)):
        engine.start(np.array([1, VOCABULARY]), 1)
    with pytest.raises(InvalidArgument, match="-1"):
        engine.start(np.array([-1]), 1)
    with pytest.raises(InvalidArgument, match="integer"):
        engine.start(np.array([1.0]), 1)
    with pytest.raises(InvalidArgument):
        engine.start(prompt_of(4), -1)


def test_prefixes_that_cannot_work_are_refused_and_change_nothing(engine: Engine) -> None:
    part = engine.layout.part_bytes
    sequence = engine.start(prompt_of(40), 4)
    with pytest.raises(WrongByteCount):
        engine.load_prefix(sequence, np.zeros((1, part - 1), np.uint8))
    with pytest.raises(InvalidArgument, match="prompt has 40"):
        engine.load_prefix(sequence, np.zeros((3, part), np.uint8))
    with pytest.raises(InvalidArgument, match="uint8"):
        engine.load_prefix(sequence, np.zeros((1, part), np.int8))
    engine.prefill(sequence)
    assert sequence.computed_tokens == 40
    with pytest.raises(InvalidArgument, match="already have KV"):
        engine.load_prefix(sequence, np.zeros((1, part), np.uint8))


def test_steps_out_of_order_are_refused(engine: Engine) -> None:
    sequence = engine.start(prompt_of(20), 1)
    with pytest.raises(InvalidArgument, match="prefill first"):
        engine.next_token(sequence, GREEDY)
    with pytest.raises(InvalidArgument, match="prefill first"):
        engine.decode(sequence, 1)
    with pytest.raises(InvalidArgument, match="chunk_tokens"):
        engine.prefill(sequence, chunk_tokens=-1)
    engine.prefill(sequence)
    with pytest.raises(InvalidArgument, match="already"):
        engine.prefill(sequence)
    with pytest.raises(InvalidArgument, match=str(VOCABULARY)):
        engine.decode(sequence, VOCABULARY)
    engine.decode(sequence, 1)
    with pytest.raises(InvalidArgument, match="room for 1"):
        engine.decode(sequence, 1)


def test_closed_and_foreign_sequences_are_refused(engine: Engine, model_dir: Path) -> None:
    sequence = engine.start(prompt_of(20), 1)
    engine.close(sequence)
    engine.close(sequence)
    assert sequence.is_closed
    with pytest.raises(InvalidArgument, match="closed"):
        engine.prefill(sequence)
    other = TransformersEngine(model_dir, block_tokens=BLOCK)
    with pytest.raises(InvalidArgument, match="another engine"):
        engine.prefill(other.start(prompt_of(20), 1))


def test_receivers_error_ends_the_prefill_which_can_then_be_resumed(engine: Engine) -> None:
    prompt = prompt_of(64)
    sequence = engine.start(prompt, 8)

    def broken(chunk: LayerChunk) -> None:
        if chunk.first_block == 2 and chunk.layer == 1:
            raise TransferFailed("the node went away")

    with pytest.raises(TransferFailed):
        engine.prefill(sequence, broken, chunk_tokens=32)
    assert (sequence.kv_tokens, sequence.computed_tokens) == (32, 32)
    engine.prefill(sequence, chunk_tokens=32)
    assert greedy(engine, sequence) == greedy(engine, prefilled(engine, prompt, chunk_tokens=32))


def test_receivers_own_runtime_error_is_not_taken_for_the_models(engine: Engine) -> None:
    def broken(chunk: LayerChunk) -> None:
        raise ValueError("a defect of the receiver")

    with pytest.raises(ValueError, match="a defect of the receiver"):
        engine.prefill(engine.start(prompt_of(40), 0), broken)


def test_failure_inside_the_model_is_engine_failed_and_leaves_the_sequence_whole(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(model_dir, block_tokens=BLOCK)
    sequence = engine.start(prompt_of(40), 8)

    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model.model.layers[1].mlp, "forward", out_of_memory)
        with pytest.raises(EngineFailed, match=r"tokens \[0, 40\).*no memory"):
            engine.prefill(sequence, lambda chunk: None)
    assert sequence.kv_tokens == 0
    engine.prefill(sequence)
    assert greedy(engine, sequence) == greedy(engine, prefilled(engine, prompt_of(40)))


def test_models_and_devices_that_cannot_work_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        TransformersEngine(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nonsense"):
        TransformersEngine(model_dir, device="nonsense")
    with pytest.raises(ConfigError, match="int3"):
        TransformersEngine(model_dir, dtype="int3")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelNotFound, match="no model"):
        TransformersEngine(tmp_path)


def test_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="SlidingWindow"):
        TransformersEngine(tmp_path)


def test_time_is_recorded_by_phase(engine: Engine) -> None:
    prompt = prompt_of(64)
    sequence = engine.start(prompt, 8)
    engine.load_prefix(sequence, engine.export_blocks(prefilled(engine, prompt), 0, 2))
    engine.prefill(sequence)
    greedy(engine, sequence)
    assert set(sequence.seconds) == {"load", "prefill", "decode"}
    assert all(seconds > 0 for seconds in sequence.seconds.values())


# ---------------------------------------------------------------- a real model


@pytest.mark.model
def test_smollm2_answers_and_reuse_does_not_change_the_answer() -> None:
    model_dir = prepare_model("smollm2-135m", default_cache_dir())
    engine = TransformersEngine(model_dir, model_name="smollm2-135m")
    as_stored = msgspec.structs.replace(engine.layout, dtype="bfloat16")
    assert (as_stored.part_bytes, as_stored.layer_bytes) == (1_474_560, 49_152)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    facts = "The sky is blue. Grass is green. Snow is white. " * 12
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": facts + "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    prompt = np.array(tokenizer(text)["input_ids"], np.int64)
    cold = engine.start(prompt, 8)
    parts = np.zeros((len(prompt) // 64, 30, engine.layout.layer_bytes), np.uint8)

    def on_layer(chunk: LayerChunk) -> None:
        rows = slice(chunk.first_block, chunk.first_block + len(chunk.blocks))
        parts[rows, chunk.layer] = chunk.blocks

    engine.prefill(cold, on_layer, chunk_tokens=128)
    warm = engine.start(prompt, 8)
    engine.load_prefix(warm, parts[:2].reshape(2, -1))
    engine.prefill(warm, chunk_tokens=128)
    answer = greedy(engine, cold)
    assert greedy(engine, warm) == answer
    assert "Paris" in tokenizer.decode(answer)
