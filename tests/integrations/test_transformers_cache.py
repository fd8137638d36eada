"""The cache for transformers: the same generation as with the library's, appended in place."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

import tiny_models
import transformers as tf
from tiny_models import KINDS, LENGTH, batch_of
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from attn_ext.integrations import transformers as hf

make = functools.cache(tiny_models.make)


@pytest.fixture(autouse=True)
def registered() -> None:
    torch.set_num_threads(1)  # the models are so small that a second thread only waits
    hf.register()


def states(new: int, *, B: int = 2, H: int = 3, D: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, new, D, generator=generator), torch.randn(B, H, new, D + 1, generator=generator)


def same(ours: DynamicLayer, theirs: DynamicLayer) -> bool:
    lengths = ours.get_seq_length() == theirs.get_seq_length()
    masks = ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    return (
        lengths and masks and torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    )


# --- generation -----------------------------------------------------------------------------------------------------

HOW = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "guessed ahead": {"prompt_lookup_num_tokens": 3},  # the guesses that were wrong are cropped
}
GENERATORS = [kind for kind in KINDS.values() if kind.name not in ("bert", "vit")]
# The library guesses ahead in a decoder alone, and crops no sliding window.
GUESSED = [
    k for k in GENERATORS if k.inputs == "tokens" and k.name not in ("mistral", "gemma2", "gpt_oss", "qwen3")
]
GENERATIONS = [(how, kind) for how in HOW for kind in (GUESSED if how == "guessed ahead" else GENERATORS)]


@pytest.mark.parametrize(
    ("how", "kind"), GENERATIONS, ids=[f"{how}-{kind.name}" for how, kind in GENERATIONS]
)
def test_generation_is_that_with_the_cache_of_the_library(kind: tiny_models.Kind, how: str) -> None:
    model, inputs = make(kind.build), batch_of(kind, "left")
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        inputs.pop(name, None)
    if how == "guessed ahead":
        inputs = {name: value[:1, :4].repeat(1, 3) for name, value in inputs.items()}
    steps = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **HOW[how]}
    results = {}
    for implementation in ("eager", "attn_ext"):
        model.set_attn_implementation(implementation)
        for cache in (None, hf.cache(model.config, capacity=4)):
            given = {} if cache is None else {"cache": cache}
            output = model.generate(
                **inputs, **steps, **given, return_dict_in_generate=True, output_logits=how == "greedy"
            )
            results[implementation, cache is None] = output
        held = getattr(cache, "self_attention_cache", cache)
        assert held.get_seq_length() > 0
        assert any(isinstance(layer, hf.PreallocatedLayer) for layer in held.layers) != (
            kind.name == "mistral"  # all its layers slide
        )
    expected = results["eager", True]
    for output in results.values():
        assert torch.equal(output.sequences, expected.sequences)
        if how == "greedy":
            for ours, theirs in zip(output.logits, expected.logits, strict=True):
                assert float((ours - theirs).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_layers_may_also_be_replicated_without_a_configuration(name: str) -> None:
    """Then sliding layers keep all positions, and the mask alone holds the window."""
    model, inputs = make(KINDS[name].build), batch_of(KINDS[name], "left")
    model.set_attn_implementation("attn_ext")
    expected = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    for cache in (Cache(layer_class_to_replicate=hf.PreallocatedLayer), hf.cache()):
        got = model.generate(**inputs, max_new_tokens=9, do_sample=False, cache=cache)
        assert torch.equal(got, expected)
        assert all(type(layer) is hf.PreallocatedLayer for layer in cache.layers)
        assert cache.get_seq_length() == LENGTH + 8


def test_special_layers_stay_those_of_the_library() -> None:
    cache = hf.cache(make(KINDS["gemma2"].build).config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, hf.PreallocatedLayer]
    both = hf.cache(make(KINDS["bart"].build).config)
    assert isinstance(both, tf.EncoderDecoderCache)
    assert isinstance(both.cross_attention_cache.layers[0], hf.PreallocatedLayer)


def test_gradients_flow_through_two_steps() -> None:
    """What an earlier step saved for its backward pass is not overwritten by a later one."""
    model = tiny_models.make(KINDS["llama"].build, "attn_ext")
    ids = batch_of(KINDS["llama"], None)["input_ids"]
    gradients = []
    for cache in (None, hf.cache(capacity=2 * LENGTH)):
        model.zero_grad()
        if cache is None:
            logits = model(input_ids=ids).logits
        else:
            parts = (ids[:, :4], ids[:, 4:5], ids[:, 5:])
            logits = torch.cat([model(input_ids=part, cache=cache).logits for part in parts], dim=1)
        logits.square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, stepwise in zip(*gradients, strict=True):
        assert float((whole - stepwise).abs().max()) <= 1e-5 * float(whole.abs().max()) + 1e-7


# --- the layer ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_appending_copies_nothing_until_the_buffer_is_full() -> None:
    layer = hf.PreallocatedLayer(capacity=8)
    addresses = []
    for step in range(100):
        keys, values = layer.update(*states(1, seed=step))
        assert keys.shape == (2, 3, step + 1, 4) and values.shape == (2, 3, step + 1, 5)
        addresses.append((keys.data_ptr(), values.data_ptr()))
    moves = [i for i in range(1, 100) if addresses[i] != addresses[i - 1]]
    assert moves == [8, 16, 32, 64]
    theirs = DynamicLayer()
    for step in range(100):
        theirs.update(*states(1, seed=step))
    assert same(layer, theirs)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_operations_leaves_what_the_library_s_layer_leaves(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    ours, theirs = hf.PreallocatedLayer(capacity=1 + draw(6)), DynamicLayer()
    B = 2
    for step in range(40):
        what = draw(7)
        for layer in (ours, theirs):
            inner = torch.Generator().manual_seed(1000 * seed + step)
            if what <= 2:
                new = states(1 + step % 5, B=B, seed=step)
                returned = layer.update(*new)
                assert torch.equal(returned[0], layer.keys) and torch.equal(returned[1], layer.values)
            elif what == 3:
                layer.crop(-min(step % 4, layer.get_seq_length()))
            elif what == 4 and layer.get_seq_length():
                layer.reorder_cache(torch.randint(B, (B,), generator=inner))
            elif what == 5 and layer.get_seq_length() and B < 8:
                layer.batch_repeat_interleave(2)
            elif what == 6 and layer.get_seq_length():
                layer.batch_select_indices(torch.tensor([B - 1, 0]))
        if theirs.is_initialized and theirs.get_seq_length():
            B = theirs.keys.shape[0]
            assert same(ours, theirs), (step, what)
        elif theirs.is_initialized:
            assert ours.get_seq_length() == 0


@torch.no_grad()
def test_room_that_cropping_freed_is_written_again_in_place() -> None:
    layer = hf.PreallocatedLayer(capacity=8)
    layer.update(*states(6))
    address = layer.keys.data_ptr()
    layer.crop(-4)
    new = states(5, seed=1)
    keys, values = layer.update(*new)
    assert keys.data_ptr() == address
    assert torch.equal(keys, torch.cat([states(6)[0][:, :, :2], new[0]], dim=2))
    assert torch.equal(values, torch.cat([states(6)[1][:, :, :2], new[1]], dim=2))
    layer.crop(-99)
    assert layer.get_seq_length() == 0
    with pytest.raises(ValueError, match="negative number, got 3"):
        layer.crop(3)


@torch.no_grad()
def test_a_bool_mask_selects_sequences() -> None:
    layer = hf.PreallocatedLayer()
    keys, _ = states(3)
    layer.update(*states(3))
    layer.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(layer.keys, keys[1:])


@torch.no_grad()
def test_after_a_reset_another_batch_may_follow() -> None:
    cache = hf.cache(capacity=4)
    for layer in range(2):
        cache.update(*states(3), layer)
    with pytest.raises(ValueError, match=r"holds keys \(2, 3, L, 4\) torch.float32.*got \(1, 3, 1, 4\)"):
        cache.update(*states(1, B=1), 0)
    with pytest.raises(ValueError, match=r"got \(2, 3, 1, 4\) torch.float64"):
        cache.update(*(t.double() for t in states(1)), 0)
    assert cache.get_seq_length() == 3
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].keys is None
    keys, _ = cache.update(*states(2, B=1), 0)
    assert keys.shape == (1, 3, 2, 4)


def test_what_inference_mode_filled_can_be_continued_outside() -> None:
    layer = hf.PreallocatedLayer(capacity=8)
    with torch.inference_mode():
        layer.update(*states(2))
    with torch.no_grad():
        keys, _ = layer.update(*states(2, seed=1))
    assert torch.equal(keys, torch.cat([states(2)[0], states(2, seed=1)[0]], dim=2))


def test_states_that_a_backward_pass_needs_are_not_overwritten() -> None:
    layer = hf.PreallocatedLayer(capacity=8)
    keys, values = (t.requires_grad_() for t in states(3))
    held, _ = layer.update(keys, values)
    loss = held.square().sum()
    with torch.no_grad():
        layer.crop(-2)
        layer.update(*states(2, seed=1))
    (gradient,) = torch.autograd.grad(loss, keys)
    assert torch.equal(gradient, 2 * keys)


@torch.no_grad()
def test_states_that_are_put_in_by_hand_are_not_written_to() -> None:
    layer = hf.PreallocatedLayer(capacity=8)
    layer.update(*states(3))
    mine, my_values = states(5, seed=2)
    wide, wide_values = torch.zeros(2, 3, 9, 4), torch.zeros(2, 3, 9, 5)
    wide[:, :, :5], wide_values[:, :, :5] = mine, my_values
    layer.keys, layer.values = wide[:, :, :5], wide_values[:, :, :5]
    keys, _ = layer.update(*states(1, seed=3))
    assert torch.equal(keys[:, :, :5], mine) and layer.get_seq_length() == 6
    assert not wide[:, :, 5:].any()


def test_room_is_made_ahead() -> None:
    cache = hf.cache(make(KINDS["llama"].build).config, capacity=16)
    cache.early_initialization(2, 3, 4, torch.float64, torch.device("cpu"))
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys.shape == (2, 3, 0, 4) and cache.layers[0].keys.dtype == torch.float64


@pytest.mark.parametrize("make_one", [hf.cache, hf.PreallocatedLayer])
def test_a_cache_without_room_is_refused(make_one: Any) -> None:
    with pytest.raises(ValueError, match="capacity of a cache must be at least 1, got 0"):
        make_one(capacity=0)
