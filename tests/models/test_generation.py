"""Generation: every token is the one that full passes give; batches, beams, drawing, stopping, and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ext import DecoderCache, KVCache, PagedKVCache, masks
from attn_ext.models import CausalLM, LogitsError, Seq2SeqTransformer
from attn_ext.models.generation import Decoding, decode, next_token_probabilities, row_seed

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, MAX_LEN = 40, 48
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2, "rotary_base": 30.0},
    "gpt2": {"positions": "learned", "activation": "gelu_tanh", "norm": "layer", "bias": True},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@functools.cache
def _made(layout: str, vocab: int, options: tuple[tuple[str, Any], ...]) -> CausalLM:
    torch.manual_seed(5)
    sizes = {"max_len": MAX_LEN, "tie_embeddings": False, **LAYOUTS[layout], **dict(options)}
    lm = CausalLM(vocab, 32, 4, 48, 2, **sizes).eval()
    with torch.no_grad():
        for parameter in lm.parameters():  # at the size of its start, a model writes one token for ever
            parameter.mul_(12.0 if parameter.dim() > 1 else 1.0)
    return lm


def model(layout: str = "llama", vocab: int = VOCAB, **options: Any) -> CausalLM:
    """A model of its own, with sharp opinions."""
    return copy.deepcopy(_made(layout, vocab, tuple(options.items())))


def prompt(length: int, batch: int = 1, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_full_passes(
    lm: CausalLM, tokens: Tensor, count: int, eos: Sequence[int] = (), **options: Any
) -> Tensor:
    """Greedy, the slow way: tokens (1, L) → the new ones (n,)."""
    written: list[int] = []
    while len(written) < count and not (written and written[-1] in eos):
        text = torch.cat([tokens, torch.tensor([written], dtype=torch.int64)], dim=1)
        written.append(int(lm(text, **{k: v(text) for k, v in options.items()})[0, -1].argmax()))
    return torch.tensor(written)


def left_padded(rows: Sequence[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    tokens = torch.full((len(rows), longest), pad)
    for b, row in enumerate(rows):
        tokens[b, longest - len(row) :] = row
    return tokens, torch.arange(longest) >= longest - torch.tensor([len(row) for row in rows])[:, None]


# ---------------------------------------------------------------------- greedy


@each_layout
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_greedy_tokens_are_those_of_full_passes(layout: str, kind: str) -> None:
    lm, tokens = model(layout), prompt(9)
    result = lm.generate(tokens, 20, cache=kind)
    assert torch.equal(result[:, :9], tokens) and result.dtype == tokens.dtype
    assert torch.equal(result[0, 9:], by_full_passes(lm, tokens, 20))
    assert len(set(result[0, 9:].tolist())) > 5  # no text that anything would write


@each_layout
def test_cached_logits_equal_those_of_one_pass(layout: str) -> None:
    lm, tokens = model(layout), prompt(21, batch=2)
    cache = lm.new_cache(2)
    with torch.no_grad():
        found = torch.cat([lm(part, cache=cache) for part in tokens.split([5, 9, 1, 1, 5], dim=1)], dim=1)
        torch.testing.assert_close(found, lm(tokens), rtol=0, atol=1e-5)
        packed = lm(tokens.flatten()[:26], cache=lm.new_cache(2), cu_seqlens=torch.tensor([0, 21, 26]))
    torch.testing.assert_close(packed, lm(tokens).flatten(0, 1)[:26].detach(), rtol=0, atol=1e-5)


def test_a_sliding_cache_writes_what_a_window_shows() -> None:
    lm, tokens = model(), prompt(20)
    cache = lm.new_cache(1, kind="sliding", window=7)
    result = lm.generate(tokens, 15, cache=cache)
    window = {"mask": lambda text: masks.sliding_window(text.shape[1], left=6, right=0)}
    assert torch.equal(result[0, 20:], by_full_passes(lm, tokens, 15, **window))
    assert not torch.equal(result[0, 20:], by_full_passes(lm, tokens, 15))


def test_a_sliding_cache_goes_on_past_max_len_where_positions_are_rotary() -> None:
    result = model().generate(prompt(40), 50, cache=model().new_cache(1, kind="sliding", window=16))
    assert result.shape == (1, 90)
    shifted = model().generate(prompt(40)[:, 8:], 5, cache=model().new_cache(1, kind="sliding", window=4))
    whole = model().generate(prompt(40), 5, cache=model().new_cache(1, kind="sliding", window=4))
    assert torch.equal(shifted[:, -5:], whole[:, -5:])  # only distances count
    learned = model("gpt2")
    with pytest.raises(ValueError, match="need 89 positions, and max_len is 48"):
        learned.generate(prompt(40), 50, cache=learned.new_cache(1, kind="sliding", window=16))
    with pytest.raises(ValueError, match="need 89 positions, and max_len is 48"):
        model().generate(prompt(40), 50, cache=model().new_cache(1, kind="sliding", window=49))


def test_an_int8_cache_is_near() -> None:
    lm, tokens = model(), prompt(12, batch=2)
    cache = lm.new_cache(2, quantized=True)
    with torch.no_grad():
        difference = (lm(tokens, cache=cache) - lm(tokens)).abs().max().item()
    assert 0 < difference < 1.0 and cache[0].k.dtype == torch.int8
    for cached in cache:
        cached.reset()
    assert lm.generate(tokens, 5, cache=cache).shape == (2, 17)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_write_as_their_full_passes(dtype: torch.dtype) -> None:
    lm, tokens = model().to(dtype), prompt(9)
    assert torch.equal(lm.generate(tokens, 6)[0, 9:], by_full_passes(lm, tokens, 6))


def test_autocast_has_caches_in_its_dtype() -> None:
    lm = model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lm.new_cache(1)[0].dtype == torch.bfloat16
        assert torch.equal(lm.generate(prompt(9), 6)[0, 9:], by_full_passes(lm, prompt(9), 6))
    assert lm.new_cache(1)[0].dtype == torch.float32
    assert lm.new_cache(1, dtype=torch.float64)[0].dtype == torch.float64


# ---------------------------------------------------------------------- batches


@each_layout
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_each_row_of_a_left_padded_batch_writes_what_it_writes_alone(layout: str, kind: str) -> None:
    lm = model(layout)
    rows = [prompt(n, seed=n)[0] for n in (3, 7, 33)]
    tokens, mask = left_padded(rows, pad=-100)  # padding need not even be a token
    result = lm.generate(tokens, 10, mask=mask, cache=kind)
    assert torch.equal(result[:, :33], tokens)
    for row, written in zip(rows, result[:, 33:], strict=True):
        assert torch.equal(written, by_full_passes(lm, row[None], 10))
        assert torch.equal(written, lm.generate(row[None], 10)[0, len(row) :])


def test_rows_end_at_different_steps_and_give_only_padding_after() -> None:
    lm = model()
    rows = [prompt(n, seed=n)[0] for n in (3, 7, 33)]
    tokens, mask = left_padded(rows)
    free = lm.generate(tokens, 10, mask=mask)[:, 33:]
    eos = [int(free[0, 2]), int(free[1, 6])]  # whatever row 2 does with them
    result = lm.generate(tokens, 10, mask=mask, eos=eos, pad=VOCAB - 1)[:, 33:]
    lengths = []
    for row, written in zip(rows, result, strict=True):
        expected = by_full_passes(lm, row[None], 10, eos=eos)
        lengths.append(len(expected))
        assert torch.equal(written[: len(expected)], expected)
        assert (written[len(expected) :] == VOCAB - 1).all()
    assert lengths[0] <= 3 and lengths[1] <= 7 and len(set(lengths)) > 1
    assert result.shape[1] == max(lengths)
    defaulted = lm.generate(tokens, 10, mask=mask, eos=eos)[:, 33:]
    assert (defaulted[0, lengths[0] :] == eos[0]).all()


def test_logits_of_a_row_in_a_batch_are_those_alone() -> None:
    lm = model()
    rows = [prompt(n, seed=n)[0] for n in (3, 7, 33)]
    cu_seqlens = torch.tensor([0, 3, 10, 43])
    with torch.no_grad():
        together = lm(torch.cat(rows), cache=lm.new_cache(3), cu_seqlens=cu_seqlens).split([3, 7, 33])
        for row, logits in zip(rows, together, strict=True):
            torch.testing.assert_close(logits, lm(row[None])[0], rtol=0, atol=1e-5)


def test_a_bf16_batch_of_32_heads_of_128_with_27_pads_writes_as_alone() -> None:
    torch.manual_seed(0)
    lm = CausalLM(64, 4096, 32, 64, 1, num_kv_heads=4, max_len=64, norm="layer", tie_embeddings=False)
    lm = lm.bfloat16().eval()
    rows = [prompt(n, vocab=64, seed=n)[0] for n in (33, 6)]
    tokens, mask = left_padded(rows)
    assert (~mask[1]).sum() == 27
    result = lm.generate(tokens, 10, mask=mask)[:, 33:]
    for row, written in zip(rows, result, strict=True):
        assert torch.equal(written, lm.generate(row[None], 10)[0, len(row) :])


def test_neither_padding_nor_rows_that_ended_are_computed() -> None:
    lm, seen = model(), []
    lm.embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    tokens, mask = left_padded([prompt(n, seed=n)[0] for n in (3, 7, 33)])
    free = lm.generate(tokens, 6, mask=mask)[:, 33:]
    assert seen == [43, 3, 3, 3, 3, 3]
    seen.clear()
    result = lm.generate(tokens, 6, mask=mask, eos=int(free[0, 0]), pad=-1)[:, 33:]
    assert seen == [43, *(result[:, :-1] >= 0).sum(0).sub(result[:, :-1].eq(free[0, 0]).sum(0)).tolist()]
    assert seen[1] < 3


def test_a_mask_without_padding_changes_nothing() -> None:
    lm, tokens = model(), prompt(5, batch=2)
    assert torch.equal(
        lm.generate(tokens, 5, mask=torch.ones(2, 5, dtype=torch.bool)), lm.generate(tokens, 5)
    )


def test_no_rows_and_no_new_tokens_are_fine() -> None:
    lm = model()
    assert lm.generate(prompt(5, batch=0), 4).shape == (0, 5)
    assert torch.equal(lm.generate(prompt(5), 0), prompt(5))
    assert lm.generate(prompt(5).int(), 3).dtype == torch.int32


# ---------------------------------------------------------------------- how long


def test_all_but_the_last_token_have_to_fit() -> None:
    lm = model(max_len=8)
    assert lm.generate(prompt(6), 3).shape == (1, 9)
    with pytest.raises(
        ValueError, match="prompt of 6 tokens and 5 new ones.* need 10 positions, and max_len is 8"
    ):
        lm.generate(prompt(6), 5)
    tokens, mask = left_padded([prompt(2)[0], prompt(6)[0]])
    with pytest.raises(ValueError, match="need 10 positions"):
        lm.generate(tokens, 5, mask=mask)
    with pytest.raises(ValueError, match="need 9 positions"):
        lm.generate(prompt(9), 1)
    padded = torch.zeros(1, 20, dtype=torch.int64)  # padding takes no position
    assert lm.generate(padded, 3, mask=torch.arange(20)[None] >= 14).shape == (1, 23)


def test_a_cache_that_is_too_small_is_refused_before_anything_is_written() -> None:
    lm = model()
    options = {"num_kv_heads": 2, "head_dim": 8}
    small = [KVCache(1, **options, capacity=8, max_capacity=8) for _ in range(2)]
    with pytest.raises(IndexError, match="10 places are more than max_capacity, 8"):
        lm.generate(prompt(6), 5, cache=small)
    assert all(cache.max_length == 0 and not cache.k.any() for cache in small)
    assert lm.generate(prompt(6), 3, cache=small).shape == (1, 9)
    pool = lm.new_cache(2, 8, kind="paged", page_size=4)
    for cache in pool:
        cache.max_blocks = 4
    with pytest.raises(
        IndexError, match="2 sequences of up to 10 tokens need 6 blocks of 4, and the cache may have 4"
    ):
        lm.generate(prompt(6, batch=2), 5, cache=pool)
    assert lm.generate(prompt(4, batch=2), 5, cache=pool).shape == (2, 9)


def test_forward_with_a_cache_goes_no_further_than_max_len() -> None:
    for layout in LAYOUTS:
        lm = model(layout)
        cache = lm.new_cache(2, kind="paged")  # which has no limit of its own
        with torch.no_grad():
            lm(prompt(47, batch=2), cache=cache)
            with pytest.raises(
                ValueError, match="sequence 0: 2 tokens at position 47 need 49 positions.* is 48"
            ):
                lm(prompt(2, batch=2), cache=cache)
            lm(prompt(1)[0], cache=cache, cu_seqlens=torch.tensor([0, 0, 1]))
            with pytest.raises(ValueError, match="sequence 1: 1 tokens at position 48"):
                lm(prompt(1)[0], cache=cache, cu_seqlens=torch.tensor([0, 0, 1]))
        assert cache[0].lengths.tolist() == cache[1].lengths.tolist() == [47, 48]


def test_memory_is_there_from_the_start_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, made = model(), []

    def noted(*args: Any, **options: Any) -> list[KVCache]:
        caches = CausalLM.new_cache(lm, *args, **options)
        made.extend((weakref.ref(cache), repr(cache)) for cache in caches)
        return caches

    monkeypatch.setattr(lm, "new_cache", noted)
    lm.generate(prompt(9), 20)
    lm.generate(prompt(9), 20, num_beams=3)
    gc.collect()
    assert len(made) == 4 and not any(ref() for ref, _ in made)
    assert made[0][1].startswith("KVCache(") and "capacity=28," in made[0][1]
    assert (
        made[2][1].startswith("PagedKVCache(") and "page_size=16, num_blocks=2," in made[2][1]
    )  # beams share them


# ---------------------------------------------------------------------- drawing


def plain_probabilities(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """The definition, token by token."""
    raw = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(raw)), key=lambda token: (-raw[token], token))[:top_k]
    kept, reached, whole = [], 0.0, sum(raw[token] for token in order)
    for token in order:
        if top_p is not None and top_p < 1 and reached / whole >= top_p:
            break
        kept.append(token)
        reached += raw[token]
    return [raw[token] / reached if token in kept else 0.0 for token in range(len(raw))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.6, 1.0])
def test_probabilities_are_those_of_the_definition(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(20, 12) * 3
    logits[5:10] = logits[5:10].round()  # ties
    found = next_token_probabilities(logits, temperature, top_k, top_p)
    expected = [plain_probabilities(row, temperature, top_k, top_p) for row in logits.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert torch.equal(found > 0, torch.tensor(expected, dtype=torch.float64) > 0)


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 1e30, 0.0]])
    assert next_token_probabilities(logits, 1e-6).tolist() == [[0.5, 0.0, 0.5, 0.0]]
    assert next_token_probabilities(logits, 1e-6, top_k=1).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(next_token_probabilities(logits, 1e38)[0, 3].item(), 0.25, rtol=0.01, atol=0)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(options: dict[str, Any]) -> None:
    lm, rows = model(vocab=8), 4000
    with torch.no_grad():
        probabilities = next_token_probabilities(lm(prompt(4, vocab=8))[0, -1], 3.0, **options)
    drawn = lm.generate(prompt(4, vocab=8).expand(rows, -1), 1, temperature=3.0, seed=1, **options)[:, -1]
    counts = torch.bincount(drawn, minlength=8).double()
    assert not counts[probabilities == 0].any()
    deviation = (rows * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - rows * probabilities).abs() <= 4 * deviation + 1e-9).all()


def test_a_row_draws_the_same_in_any_batch() -> None:
    lm = model()
    rows = [prompt(n, seed=n)[0] for n in (3, 7, 12, 5)]
    tokens, mask = left_padded(rows)
    options = {"temperature": 1.5, "top_p": 0.95}
    together = lm.generate(tokens, 12, mask=mask, seed=7, **options)[:, 12:]
    assert torch.equal(together, lm.generate(tokens, 12, mask=mask, seed=7, **options)[:, 12:])
    assert not torch.equal(together, lm.generate(tokens, 12, mask=mask, seed=8, **options)[:, 12:])
    for b, row in enumerate(rows):
        alone = lm.generate(row[None], 12, seed=[row_seed(7, b)], **options)[0, len(row) :]
        assert torch.equal(alone, together[b])
    eos = int(together[1, 3])  # a row that ends takes no numbers from the others
    ended = lm.generate(tokens, 12, mask=mask, seed=7, eos=eos, **options)[:, 12:]
    for found, free in zip(ended, together, strict=True):
        end = free.tolist().index(eos) + 1 if eos in free.tolist() else 12
        assert torch.equal(found[:end], free[:end]) and (found[end:] == eos).all()


def test_equal_prompts_are_continued_differently() -> None:
    result = model().generate(prompt(4).expand(6, -1), 8, temperature=2.0, seed=0)
    assert len({tuple(row) for row in result.tolist()}) == 6


def test_without_a_seed_torchs_generator_decides_and_greedy_leaves_it_alone() -> None:
    lm = model()
    torch.manual_seed(3)
    first = lm.generate(prompt(4), 8, temperature=2.0)
    second = lm.generate(prompt(4), 8, temperature=2.0)
    torch.manual_seed(3)
    assert torch.equal(lm.generate(prompt(4), 8, temperature=2.0), first) and not torch.equal(first, second)
    before = torch.get_rng_state()
    lm.generate(prompt(4), 8)
    lm.generate(prompt(4), 8, temperature=2.0, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_very_low_temperature_is_greedy() -> None:
    lm = model()
    assert torch.equal(lm.generate(prompt(4), 8, temperature=1e-9, seed=0), lm.generate(prompt(4), 8))


# ---------------------------------------------------------------------- beams


Scores = Callable[[tuple[int, ...]], list[float]]


def scores_of(step: Callable[[list[int]], Tensor]) -> Scores:
    """Log-probabilities of what follows, by full passes."""

    @functools.cache
    @torch.no_grad()
    def scores(text: tuple[int, ...]) -> list[float]:
        return step(list(text)).double().log_softmax(-1).tolist()

    return scores


def plain_beams(
    scores: Scores, beams: int, count: int, eos: Sequence[int], penalty: float
) -> tuple[int, ...]:
    """Beam search with lists, which never stops early."""
    live, best = [(0.0, ())], (-math.inf, ())
    for length in range(1, count + 1):
        ranked = sorted(
            ((s + p, (*text, token)) for s, text in live for token, p in enumerate(scores(text))),
            reverse=True,
        )
        for s, text in ranked[:beams]:
            if text[-1] in eos or length == count:
                best = max(best, (s / length**penalty, text))
        live = [entry for entry in ranked if entry[1][-1] not in eos][:beams]
    return best[1]


def likeliest_text(
    scores: Scores, vocab: int, count: int, eos: Sequence[int], penalty: float
) -> tuple[int, ...]:
    """Every text there is."""
    best = (-math.inf, ())
    for length in range(1, count + 1):
        for text in itertools.product(range(vocab), repeat=length):
            ended = text[-1] in eos or length == count
            if ended and not any(token in eos for token in text[:-1]):
                total = sum(scores(text[:i])[token] for i, token in enumerate(text))
                best = max(best, (total / length**penalty, text))
    return best[1]


def trimmed(row: Tensor, eos: Sequence[int]) -> tuple[int, ...]:
    tokens = row.tolist()
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tuple(tokens[:end])


def flat_model(layout: str, vocab: int) -> CausalLM:
    """One whose likeliest text is not the greedy one."""
    lm = model(layout, vocab)
    with torch.no_grad():
        lm.output.weight.mul_(0.3)
    return lm


@each_layout
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("eos", [(), (1,), (0, 3)], ids=str)
def test_enough_beams_find_the_likeliest_text_of_all(
    layout: str, penalty: float, eos: tuple[int, ...]
) -> None:
    lm = flat_model(layout, 4)
    tokens = prompt(5, batch=2, vocab=4)
    result = lm.generate(tokens, 4, num_beams=64, eos=eos or None, length_penalty=penalty)
    for row, written in zip(tokens, result[:, 5:], strict=True):
        scores = scores_of(
            lambda text, row=row: lm(torch.cat([row, torch.tensor(text, dtype=torch.int64)])[None])[0, -1]
        )
        expected = likeliest_text(scores, 4, 4, eos, penalty)
        assert trimmed(written, eos) == expected
        assert set(written[len(expected) :].tolist()) <= set(eos[:1])


@each_layout
@pytest.mark.parametrize("kind", ["contiguous", "paged", None])
@pytest.mark.parametrize(("beams", "penalty"), [(2, 0.0), (5, 0.0), (2, 1.0), (5, 1.0), (3, 3.0), (3, -1.0)])
def test_beams_are_those_of_a_plain_search(layout: str, kind: str | None, beams: int, penalty: float) -> None:
    lm, eos = flat_model(layout, 12), (2, 5)
    rows = [prompt(n, vocab=12, seed=n)[0] for n in (3, 7, 12)]
    tokens, mask = left_padded(rows)
    options = {"num_beams": beams, "length_penalty": penalty, "eos": eos, "pad": -1, "cache": kind}
    result = lm.generate(tokens, 9, mask=mask, **options)[:, 12:]
    for row, written in zip(rows, result, strict=True):
        scores = scores_of(
            lambda text, row=row: lm(torch.cat([row, torch.tensor(text, dtype=torch.int64)])[None])[0, -1]
        )
        expected = plain_beams(scores, beams, 9, eos, penalty)
        assert trimmed(written, eos) == expected
        assert (written[len(expected) :] == -1).all()


class Script:
    """A model without weights: probabilities by rule, and a cache that is the texts themselves."""

    def __init__(self, rule: Callable[[tuple[int, ...]], dict[int, float]], vocab: int) -> None:
        self.rule, self.vocab = rule, vocab
        self.texts: list[tuple[int, ...]] = [()]

    def logits(self) -> Tensor:
        rows = [[self.rule(text).get(token, 1e-9) for token in range(self.vocab)] for text in self.texts]
        return torch.tensor(rows, dtype=torch.float64).log()

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        self.texts = [self.texts[i] for i in indices]

    def read(self, tokens: Tensor, active: Tensor) -> Tensor:
        assert active.tolist() == list(range(len(self.texts)))
        self.texts = [(*text, token) for text, token in zip(self.texts, tokens.tolist(), strict=True)]
        return self.logits()


@pytest.mark.parametrize(
    ("penalty", "first", "then", "expected"),
    [
        # log 0.4 = −0.92 at once, and log 0.12 / 4 = −0.53 at the end: long texts are favoured
        (1.0, {0: 0.4, 1: 0.12}, {1: 1.0}, [1, 1, 1, 1]),
        # log 0.1 · 1 = −2.3 at once, and log 0.5 · 2 = −1.4 in the next step: short ones are
        (-1.0, {0: 0.1, 1: 0.5}, {0: 1.0}, [1, 0]),
    ],
)
def test_a_search_goes_on_while_a_beam_may_become_better(
    penalty: float, first: dict[int, float], then: dict[int, float], expected: list[int]
) -> None:
    rest = {token: (1 - sum(first.values())) / 6 for token in range(2, 8)}
    uniform = dict.fromkeys(range(8), 1 / 8)
    script = Script(lambda text: {**first, **rest} if not text else then if text[0] == 1 else uniform, 8)
    decoding = Decoding("test", 8, 4, num_beams=2, eos=0, length_penalty=penalty)
    assert decode(script.logits(), script.read, [script], decoding).tolist() == [expected]


def test_a_search_stops_when_no_beam_can_become_better() -> None:
    script = Script(lambda text: {0: 0.9, 1: 0.05, 2: 0.05}, 3)
    decoding = Decoding("test", 3, 50, num_beams=2, eos=0, length_penalty=0.0)
    assert decode(script.logits(), script.read, [script], decoding).tolist() == [[0]]
    assert script.texts == []  # nothing was read, and the beams are gone


def test_beams_find_a_likelier_text_than_greedy() -> None:
    lm = flat_model("llama", 12)
    better = 0
    for seed in range(8):
        tokens = prompt(4, vocab=12, seed=seed)
        texts = (lm.generate(tokens, 8), lm.generate(tokens, 8, num_beams=4))
        with torch.no_grad():
            totals = [
                lm(text)[0, 3:-1].log_softmax(-1).gather(1, text[0, 4:, None]).sum().item() for text in texts
            ]
        assert totals[1] >= totals[0] - 1e-5
        better += totals[1] > totals[0] + 1e-3
    assert better


def test_more_beams_than_tokens_and_only_ends_work() -> None:
    lm = flat_model("llama", 3)
    assert lm.generate(prompt(4, vocab=3), 5, num_beams=7).shape == (1, 9)
    assert lm.generate(prompt(4, vocab=3), 5, num_beams=7, eos=[0, 1, 2]).shape == (1, 5)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_reordered_beams_go_on_with_their_own_text(kind: str) -> None:
    lm, texts = model(), prompt(4, batch=3)
    cache = lm.new_cache(3, 20, kind=kind)
    with torch.no_grad():
        lm(texts, cache=cache)
        for order in ([2, 0, 0], [1, 1, 2]):
            for layer in cache:
                layer.reorder(torch.tensor(order))
            texts = texts[order]
            token = prompt(1, batch=3, seed=sum(order) + len(texts[0]))  # another one for each beam
            texts = torch.cat([texts, token], dim=1)
            found = lm(token, cache=cache)[:, 0]
            torch.testing.assert_close(found, lm(texts)[:, -1], rtol=0, atol=1e-5)
    assert [layer.lengths.tolist() for layer in cache] == [[6, 6, 6]] * 2


# ---------------------------------------------------------------------- twice, failures, modes, copies


class Stopped(Exception):
    pass


@pytest.mark.parametrize("batch", [1, 3])
def test_every_call_starts_clean(batch: int) -> None:
    lm, fresh = model(), model()
    a, b = prompt(9, batch), prompt(4, batch, seed=1)
    first = lm.generate(a, 12)
    lm.generate(b, 12)
    assert torch.equal(lm.generate(a, 12), first)
    assert torch.equal(fresh.generate(a, 12), first)
    trained = lm.train()(a)
    assert torch.equal(trained, fresh.train()(a)) and trained.requires_grad
    trained.sum().backward()

    def fail(tokens: Tensor) -> None:
        fail.steps += 1
        if fail.steps == 5:
            raise Stopped

    fail.steps = 0
    with pytest.raises(Stopped):
        lm.generate(a, 12, callback=fail)
    assert lm.training and torch.is_grad_enabled()
    assert torch.equal(lm.generate(a, 12), first)
    assert torch.equal(lm.eval()(a), fresh.eval()(a))


def test_modes_come_back_as_they_were() -> None:
    lm = model(dropout=0.5).train()
    lm.blocks.layers[0].eval()  # a frozen block
    before = [module.training for module in lm.modules()]
    result = lm.generate(prompt(4), 8)
    assert [module.training for module in lm.modules()] == before and torch.is_grad_enabled()
    assert torch.equal(result, lm.eval().generate(prompt(4), 8))  # without dropout
    with pytest.raises(ValueError):
        lm.train().generate(prompt(40), 20)
    assert lm.training
    with torch.inference_mode():
        assert torch.equal(lm.eval().generate(prompt(4), 8), result)
    assert not result.is_inference()  # it can be trained on
    lm(result).sum().backward()


def test_the_callback_gets_each_column_as_it_is_complete() -> None:
    lm, columns = model(), []
    rows = [prompt(n, seed=n)[0] for n in (3, 7)]
    tokens, mask = left_padded(rows)
    free = lm.generate(tokens, 10, mask=mask)[:, 7:]

    def collect(column: Tensor) -> None:
        assert not column.is_inference()
        columns.append(column.clone())
        column.fill_(0)  # ours, not the model's

    result = lm.generate(tokens, 10, mask=mask, eos=int(free[0, 3]), pad=-7, callback=collect)
    assert torch.equal(torch.stack(columns, dim=1), result[:, 7:]) and (result == -7).any()


def test_two_threads_may_write_with_one_model() -> None:
    lm = model(dropout=0.3).train()
    prompts = [prompt(4, seed=1), prompt(9, seed=2)]
    expected = [lm.generate(tokens, 20) for tokens in prompts]
    found: list[list[Tensor]] = [[], []]

    def write(which: int) -> None:
        torch.set_num_threads(1)
        for _ in range(10):
            found[which].append(lm.generate(prompts[which], 20))

    threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert all(len(results) == 10 for results in found)
    assert all(torch.equal(result, expected[which]) for which in range(2) for result in found[which])
    assert all(module.training for module in lm.modules())


def test_copies_and_files_of_a_model_that_has_written_hold_no_cache() -> None:
    lm = model()
    names, size = list(lm.state_dict()), len(pickle.dumps(lm))
    cache = lm.new_cache(1)
    expected = lm.generate(prompt(9), 8, cache=cache)
    with pytest.raises(ValueError, match="needs a gradient"):
        lm(prompt(1), cache=cache)
    assert list(lm.state_dict()) == names and len(pickle.dumps(lm)) == size
    file = io.BytesIO()
    torch.save(lm, file)
    file.seek(0)
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm)), torch.load(file, weights_only=False)):
        assert torch.equal(twin.generate(prompt(9), 8), expected)
    twins = (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)))
    with torch.no_grad():
        logits = lm(expected[:, -1:], cache=cache)
        for twin in twins:
            assert twin[0].lengths.tolist() == [
                16
            ]  # the last token was not read, and the original has gone on since
            torch.testing.assert_close(lm(expected[:, -1:], cache=twin), logits, rtol=0, atol=0)
    assert cache[0].lengths.tolist() == [17]


def test_own_caches_keep_what_was_written() -> None:
    lm = model()
    tokens, mask = left_padded([prompt(n, seed=n)[0] for n in (3, 7)])
    cache = lm.new_cache(2)
    result = lm.generate(tokens, 5, mask=mask, cache=cache)
    assert cache[0].lengths.tolist() == cache[1].lengths.tolist() == [7, 11]
    with torch.no_grad():
        following = lm(result[:, -1:], cache=cache)[:, 0]
        whole = lm(result[:1, 4:])[0, -1]
    torch.testing.assert_close(following[0], whole, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match="expected empty caches of 2 sequences, and that of layer 0 has 2 with 12"
    ):
        lm.generate(tokens, 5, mask=mask, cache=cache)
    for layer in cache:
        layer.reset()
    assert torch.equal(lm.generate(tokens, 5, mask=mask, cache=cache), result)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of at least 0, got -1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer of at least 0, got 2.0"),
        ({"temperature": -0.5}, "temperature must be a number of at least 0, got -0.5"),
        ({"temperature": "1"}, "temperature must be a number of at least 0, got '1'"),
        ({"top_p": "1"}, "top_p must be above 0 and at most 1, got '1'"),
        ({"length_penalty": "1"}, "length_penalty must be a number from -10 to 10, got '1'"),
        ({"temperature": math.nan}, "temperature must be a number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be a number of at least 0, got inf"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"num_beams": 0}, "num_beams must be an integer of at least 1, got 0"),
        ({"length_penalty": math.nan}, "length_penalty must be a number from -10 to 10, got nan"),
        ({"length_penalty": 400, "num_beams": 2}, "length_penalty must be a number from -10 to 10, got 400"),
        (
            {"length_penalty": -400, "num_beams": 2},
            "length_penalty must be a number from -10 to 10, got -400",
        ),
        ({"eos": 40}, "eos must be tokens from 0 to 39, got 40"),
        ({"eos": [3, -1]}, r"eos must be tokens from 0 to 39, got \[3, -1\]"),
        ({"eos": 1.0}, "eos must be tokens from 0 to 39, got 1.0"),
        ({"eos": True}, "eos must be tokens from 0 to 39, got True"),
        ({"pad": 0.5}, "pad must be an integer of 64 bits, got 0.5"),
        ({"pad": 2**70}, "pad must be an integer of 64 bits, got 1180591620717411303424"),
        ({"num_beams": 2, "temperature": 1.0}, "num_beams = 2 goes with temperature 0, got 1.0"),
        ({"num_beams": 2, "callback": print}, "callback needs num_beams = 1, got 2"),
        ({"temperature": 1.0, "seed": [1]}, r"seed must be .* for each of 2 rows, got \[1\]"),
        ({"temperature": 1.0, "seed": [2**80, 1]}, r"one below 2\*\*64 for each of 2 rows, got \[1208"),
        ({"temperature": 1.0, "seed": -1}, "seed must be an integer of at least 0"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens must be \(B, L\), got \(3,\)"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, "row 0 has no token to begin with"),
        ({"tokens": torch.tensor([[3, 40]])}, "tokens must be 0 to 39, got 3 to 40"),
        ({"tokens": torch.tensor([[3, -1]])}, "tokens must be 0 to 39, got -1 to 3"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask must be \(2, 5\) as tokens are, got \(2, 4\)"),
        ({"mask": torch.tensor([[True] * 5, [False] * 5])}, "row 1 has no token to begin with"),
        ({"cache": "ring"}, "cache must be one of contiguous, paged, or .* got 'ring'"),
        ({"cache": "sliding"}, "cache must be one of contiguous, paged, or .* got 'sliding'"),
        ({"cache": []}, "CausalLM.generate: cache must be a list with one cache for each of 2 blocks, got 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_that_mean_nothing_are_named(options: dict[str, Any], message: str) -> None:
    lm = model().train()
    options = {"tokens": prompt(5, batch=2), "max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=message) as caught:
        lm.generate(**options)
    assert "CausalLM" in str(caught.value) and lm.training and torch.is_grad_enabled()


def test_other_types_are_named() -> None:
    lm = model()
    with pytest.raises(TypeError, match="tokens must be a tensor of int32 or int64, got torch.float32"):
        lm.generate(torch.zeros(1, 3), 3)
    with pytest.raises(TypeError, match="tokens must be a tensor of int32 or int64, got list"):
        lm.generate([[1, 2]], 3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="mask must be a bool tensor, True where a token stands, got torch.int64"
    ):
        lm.generate(prompt(3), 3, mask=torch.ones(1, 3, dtype=torch.int64))


def test_a_broken_model_is_no_text() -> None:
    lm = model()
    with torch.no_grad():
        lm.output.weight[3] = math.nan
    for options in ({}, {"temperature": 1.0}, {"num_beams": 3}):
        with pytest.raises(LogitsError, match="CausalLM.generate: the model's logits are NaN"):
            lm.generate(prompt(5), 3, **options)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"num_beams": 3}]
)
@pytest.mark.parametrize(
    ("bias", "found"),
    [([0.0, math.inf, 0.0], "infinite"), ([-math.inf] * 3, "all -inf"), ([0.0, math.nan, math.inf], "NaN")],
)
def test_logits_without_a_largest_one_are_no_text(
    options: dict[str, Any], bias: list[float], found: str
) -> None:
    decoding = Decoding("a model", 3, 4, **options)
    with pytest.raises(LogitsError, match=f"a model: the model's logits are {found}, so that no token"):
        decode(torch.tensor([[0.0, 0.0, 0.0], bias]), lambda *_: torch.zeros(2, 3), [], decoding)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"num_beams": 2}])
def test_forbidden_tokens_are_never_written(options: dict[str, Any]) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]])
    decoding = Decoding("a model", 4, 5, **options)
    read = lambda tokens, active: logits.expand(len(tokens), -1)  # noqa: E731
    assert torch.isin(decode(logits, read, [], decoding), torch.tensor([1, 3])).all()


@pytest.mark.parametrize("penalty", [-10, 10])
def test_scores_of_the_strongest_penalties_are_finite(penalty: int) -> None:
    assert model().generate(prompt(5), 40, num_beams=2, length_penalty=penalty).shape == (1, 45)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature must be a finite number above 0, got 0"),
        ({"temperature": math.inf}, "temperature must be a finite number above 0, got inf"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_there_are_no_probabilities_for_settings_that_mean_nothing(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"next_token_probabilities: {message}"):
        next_token_probabilities(torch.zeros(1, 3), **options)


def untouched(caches: Sequence[Any]) -> bool:
    """Whether nothing was ever written to the caches."""
    targets = [c.target if isinstance(c, DecoderCache) else c for c in caches]
    return not any(c.max_length or c.k.any() for c in targets)


def test_bad_seeds_are_refused_before_anything_is_written() -> None:
    lm = model()
    cache = lm.new_cache(2)
    with pytest.raises(ValueError, match="seed must be"):
        lm.generate(prompt(5, batch=2), 3, temperature=1.0, seed=[1], cache=cache)
    assert untouched(cache)


def test_room_for_all_beams_is_asked_for_at_the_start() -> None:
    lm, tokens = model(), prompt(5, batch=2)

    def pools(most: int) -> list[PagedKVCache]:
        return [PagedKVCache(2, 2, 8, page_size=4, num_blocks=1, max_blocks=most) for _ in range(2)]

    small = pools(8)
    with pytest.raises(
        IndexError, match="16 sequences of up to 12 tokens need 34 blocks of 4, .* may have 8"
    ):
        lm.generate(tokens, 8, num_beams=8, cache=small)
    assert untouched(small) and [c.batch for c in small] == [2, 2]
    # The first block of each prompt is full and shared; of the others each beam may need its own.
    expected = lm.generate(tokens, 8, num_beams=8)
    assert torch.equal(lm.generate(tokens, 8, num_beams=8, cache=pools(34)), expected)


def test_bad_calls_of_forward_with_a_cache_are_named() -> None:
    for layout in LAYOUTS:
        lm = model(layout)
        cache = lm.new_cache(2)
        with torch.no_grad():
            for options in ({"positions": torch.arange(3)}, {"mask": torch.ones(3, 3, dtype=torch.bool)}):
                with pytest.raises(ValueError, match=f"{next(iter(options))} cannot be given with a cache"):
                    lm(prompt(3, batch=2), **options, cache=cache)
            with pytest.raises(ValueError, match="there are no weights with a cache"):
                lm(prompt(3, batch=2), need_weights=True, cache=cache)
            with pytest.raises(
                ValueError, match=r"expected tokens \(2, n\) for caches of 2 sequences, got \(1, 3\)"
            ):
                lm(prompt(3), cache=cache)
            with pytest.raises(
                ValueError, match=r"expected tokens \(total,\) with cu_seqlens \(3,\).*\(3,\) with \(2,\)"
            ):
                lm(prompt(3)[0], cache=cache, cu_seqlens=torch.tensor([0, 3]))
            with pytest.raises(
                ValueError, match="CausalLM: cache must be a list with one cache for each of 2 blocks"
            ):
                lm(prompt(3, batch=2), cache=cache[0])
            with pytest.raises(TypeError, match="the cache of block 0 must be a KVCache, .* got str"):
                lm(prompt(3, batch=2), cache=["a", "b"])
            with pytest.raises(ValueError, match="a cache of its own, and blocks 0 and 1 got the same"):
                lm(prompt(3, batch=2), cache=[cache[0], cache[0]])
            packed = prompt(5)[0]
            with pytest.raises(TypeError, match="cu_seqlens must be a tensor of int32 or int64, not list"):
                lm(packed, cache=cache, cu_seqlens=[0, 3, 5])
            with pytest.raises(ValueError, match="cu_seqlens must end with the 5 rows of tokens, not with 4"):
                lm(packed, cache=cache, cu_seqlens=torch.tensor([0, 3, 4]))
        with pytest.raises(ValueError, match="cu_seqlens is for calls with a cache"):
            lm(prompt(3), cu_seqlens=torch.tensor([0, 3]))
        assert cache[0].max_length == 0


@torch.no_grad()
def test_layers_that_stand_at_different_positions_are_named() -> None:
    lm = model()
    cache = lm.new_cache(1)
    cache[1].append(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(ValueError, match=r"that of layer 0 has \[0\], that of layer 1 \[3\]"):
        lm(prompt(2), cache=cache)
    assert cache[0].max_length == 0 and cache[1].max_length == 3
    with pytest.raises(ValueError, match="the caches are on the meta device"):
        lm(prompt(2), cache=[KVCache(1, 2, 8, device="meta") for _ in range(2)])
    translate = translator()
    targets = translate.new_cache(1)
    targets[0].target.append(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8))
    with pytest.raises(ValueError, match=r"that of layer 0 has \[1\], that of layer 1 \[0\]"):
        translate.decode(prompt(2) % 25, translate.encode(sources()[:1]), cache=targets)
    assert [c.source for c in targets] == [None, None]


UNFIT: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "width": (
        ValueError,
        r"layer 1 must have num_kv_heads, head_dim and v_head_dim \(2, 8, 8\), got \(2, 4, 4\)",
        lambda: KVCache(1, 2, 4),
    ),
    "heads": (ValueError, r"got \(4, 8, 8\)", lambda: KVCache(1, 4, 8)),
    "width of v": (ValueError, r"got \(2, 8, 4\)", lambda: PagedKVCache(1, 2, 8, v_head_dim=4)),
    "dtype": (
        TypeError,
        "layer 1 must have the dtype torch.float32, got torch.bfloat16",
        lambda: KVCache(1, 2, 8, dtype=torch.bfloat16),
    ),
    "batch": (ValueError, "that of layer 1 has 2 with 0 tokens", lambda: KVCache(2, 2, 8)),
    "kind": (
        TypeError,
        "block 1 must be a KVCache, .* got DecoderCache",
        lambda: DecoderCache(KVCache(1, 2, 8)),
    ),
    "no cache": (TypeError, "block 1 must be a KVCache, .* got str", lambda: "b"),
    "no data": (ValueError, "meta device", lambda: KVCache(1, 2, 8, device="meta")),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_cache_that_does_not_fit_a_later_layer_is_refused_before_anything_is_written(case: str) -> None:
    error, message, make = UNFIT[case]
    first = KVCache(1, 2, 8)
    with pytest.raises(error, match=message):
        model().generate(prompt(5), 3, cache=[first, make()])
    assert untouched([first])


def test_a_cache_of_another_class_with_the_same_interface_is_taken() -> None:
    class Own:
        """Hands everything on to a cache that it is none of itself."""

        def __init__(self) -> None:
            self.held = KVCache(1, 2, 8)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.held, name)

    lm = model()
    assert torch.equal(lm.generate(prompt(5), 6, cache=[Own(), Own()]), lm.generate(prompt(5), 6))


def test_autocast_leaves_float64_and_so_do_its_caches() -> None:
    lm = model().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lm.new_cache(1)[0].dtype == torch.float64
        assert lm.generate(prompt(5), 3).shape == (1, 8)


def test_bad_caches_are_named() -> None:
    lm = model()
    with pytest.raises(ValueError, match="no other has one; got kind='paged', window=4"):
        lm.new_cache(1, kind="paged", window=4)
    with pytest.raises(ValueError, match="capacity must be at most max_len = 48, got 49"):
        lm.new_cache(1, 49)
    with pytest.raises(ValueError, match="batch must be at least 0, not -1"):
        lm.new_cache(-1)
    assert lm.new_cache(1)[0].capacity == 48 and lm.new_cache(3, 20, kind="paged")[0].num_blocks == 6
    assert lm.new_cache(1, 9, kind="sliding", window=4)[0].capacity == 9


# ---------------------------------------------------------------------- sequence to sequence


BOS, EOS, PAD = 1, 2, 0


@functools.cache
def _made_translator(options: tuple[tuple[str, Any], ...]) -> Seq2SeqTransformer:
    torch.manual_seed(5)
    translate = Seq2SeqTransformer(20, 25, 32, 4, 48, **{"max_len": 24, **dict(options)}).eval()
    with torch.no_grad():
        for parameter in translate.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
        translate.output.weight = torch.nn.Parameter(torch.randn(25, 32) * 0.5)
    return translate


def translator(**options: Any) -> Seq2SeqTransformer:
    return copy.deepcopy(_made_translator(tuple(options.items())))


def sources() -> Tensor:
    tokens = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(3))
    tokens[1, 5:] = PAD
    tokens[2, [0, 3]] = PAD  # holes
    return tokens


@torch.no_grad()
def translated_by_full_passes(
    translate: Seq2SeqTransformer, source: Tensor, count: int, eos: Sequence[int]
) -> Tensor:
    target = [BOS]
    while len(target) <= count and target[-1] not in eos:
        target.append(int(translate(source[None], torch.tensor([target]))[0, -1].argmax()))
    return torch.tensor(target)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [None, "contiguous", "paged"])
def test_translations_are_those_of_full_passes(norm_first: bool, kind: str | None) -> None:
    translate, source = translator(norm_first=norm_first), sources()
    eos = (EOS, 13, 15)
    result = translate.generate(source, 15, bos=BOS, eos=eos, cache=kind)
    lengths = set()
    for row, written in zip(source, result, strict=True):
        expected = translated_by_full_passes(translate, row, 15, eos)
        lengths.add(len(expected))
        assert torch.equal(written[: len(expected)], expected) and (written[len(expected) :] == PAD).all()
        alone = translate.generate(row[None], 15, bos=BOS, eos=eos)[0]
        assert torch.equal(alone, expected)
    assert result.shape[1] == max(lengths) and len(lengths) > 1


def test_cached_target_logits_equal_those_of_one_pass() -> None:
    translate, source = translator(), sources()
    target = torch.randint(1, 25, (4, 8))
    mask = masks.from_tokens(source, PAD)
    cache = translate.new_cache(4)
    with torch.no_grad():
        encoded = translate.encode(source)
        found = [translate.decode(target[:, :3], encoded, mask, cache=cache)]
        found += [translate.decode(target[:, i : i + 1], None, cache=cache) for i in range(3, 8)]
        torch.testing.assert_close(torch.cat(found, dim=1), translate(source, target), rtol=0, atol=1e-5)
        with pytest.raises(
            ValueError, match="sequence 0: 17 tokens at position 8 need 25 positions, and max_len is 24"
        ):
            translate.decode(target[:, :1].expand(4, 17), None, cache=cache)
        with pytest.raises(
            ValueError, match=r"expected tokens \(4, n\) for caches of 4 sequences, got \(3, 1\)"
        ):
            translate.decode(target[:3, :1], None, cache=cache)
    assert [layer.lengths.tolist() for layer in cache] == [[8] * 4] * 2


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("beams", [2, 4])
def test_translation_beams_are_those_of_a_plain_search(kind: str, beams: int) -> None:
    translate, source, eos = translator(), sources(), (EOS, 9)
    result = translate.generate(source, 7, bos=BOS, eos=eos, num_beams=beams, length_penalty=0.7, cache=kind)
    for row, written in zip(source, result, strict=True):
        scores = scores_of(lambda text, row=row: translate(row[None], torch.tensor([[BOS, *text]]))[0, -1])
        expected = plain_beams(scores, beams, 7, eos, 0.7)
        assert trimmed(written[1:], eos) == expected and (written[1 + len(expected) :] == PAD).all()


def test_a_source_is_encoded_once_and_modes_come_back() -> None:
    translate, calls = translator(dropout=0.4).train(), []
    translate.encoder.register_forward_hook(lambda *_: calls.append(1))
    result = translate.generate(sources(), 6, bos=BOS, eos=None)
    assert len(calls) == 1 and result.shape == (4, 7) and translate.training and torch.is_grad_enabled()
    assert torch.equal(result, translate.eval().generate(sources(), 6, bos=BOS, eos=None))
    columns: list[Tensor] = []
    options = {"temperature": 1.5, "top_k": 6, "seed": 4}
    drawn = translate.generate(sources(), 6, bos=BOS, eos=None, callback=columns.append, **options)
    assert torch.equal(torch.stack(columns, dim=1), drawn[:, 1:])
    assert torch.equal(translate.generate(sources(), 6, bos=BOS, eos=None, **options), drawn)
    assert not torch.equal(drawn, result)


def test_a_source_of_padding_alone_and_no_source_write_all_the_same() -> None:
    translate = translator()
    nothing = translate.generate(torch.full((1, 4), PAD), 5, bos=BOS, eos=None)
    with torch.no_grad():
        expected = translated_by_full_passes(translate, torch.full((4,), PAD), 5, ())
    assert torch.equal(nothing[0], expected)
    assert translate.generate(torch.zeros(0, 4, dtype=torch.int64), 5, bos=BOS, eos=None).shape == (0, 1)
    assert translate.generate(sources(), 0, bos=BOS, eos=None).tolist() == [[BOS]] * 4


def test_translation_fits_where_all_but_the_last_token_do() -> None:
    translate = translator(max_len=10)
    assert translate.generate(sources(), 10, bos=BOS, eos=None).shape == (4, 11)
    for arguments, message in (
        ({"max_new_tokens": 11}, "bos and 11 new tokens.* need 11 positions, and max_len is 10"),
        ({"bos": 25}, "bos must be a token from 0 to 24, got 25"),
        ({"bos": 1.5}, "bos must be a token from 0 to 24, got 1.5"),
        ({"bos": True}, "bos must be a token from 0 to 24, got True"),
        ({"bos": 2**70}, "bos must be a token from 0 to 24, got 1180591620717411303424"),
        ({"eos": 25}, "eos must be tokens from 0 to 24, got 25"),
        ({"source": torch.full((1, 3), 20)}, "source must be 0 to 19, got 20 to 20"),
        ({"source": torch.ones(3, dtype=torch.int64)}, r"source must be \(B, L\), got \(3,\)"),
        ({"cache": "sliding"}, "cache must be one of contiguous, paged, or .* got 'sliding'"),
        (
            {"cache": translate.new_cache(3)},
            "expected empty caches of 4 sequences, and that of layer 0 has 3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            translate.generate(
                **{"source": sources(), "max_new_tokens": 3, "bos": BOS, "eos": EOS, **arguments}
            )


def test_decoder_caches_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    translate = translator()
    call = {"source": sources(), "max_new_tokens": 6, "bos": BOS, "eos": None}
    with pytest.raises(ValueError, match="kind must be one of contiguous, paged, got 'sliding'"):
        translate.new_cache(1, kind="sliding")
    with pytest.raises(TypeError, match="block 0 must be a DecoderCache, got KVCache"):
        translate.generate(**call, cache=[KVCache(4, 4, 8), KVCache(4, 4, 8)])
    for error, message, last in (
        (ValueError, r"layer 1 must have .* \(4, 8, 8\), got \(4, 4, 4\)", DecoderCache(KVCache(4, 4, 4))),
        (TypeError, "block 1 must be a DecoderCache, got str", "b"),
    ):
        cache = [translate.new_cache(4)[0], last]
        with pytest.raises(error, match=message):
            translate.generate(**call, cache=cache)
        assert untouched(cache[:1]) and cache[0].source is None
    used = translate.new_cache(4)
    used[1].source = used[1].for_source(3)
    with pytest.raises(ValueError, match="layer 1 has 4 with 0 tokens in the longest and a source"):
        translate.generate(**call, cache=used)
    pools = [DecoderCache(PagedKVCache(4, 4, 8, page_size=2, num_blocks=1, max_blocks=11)) for _ in range(2)]
    with pytest.raises(
        IndexError, match="12 sequences of up to 6 tokens need 36 blocks of 2, .* may have 11"
    ):
        translate.generate(**call, num_beams=3, cache=pools)
    assert untouched([*used, *pools]) and used[0].source is None
    target = DecoderCache(KVCache(4, 4, 8))
    with pytest.raises(ValueError, match="blocks 0 and 1 got the same one"):
        translate.generate(**call, cache=[target, DecoderCache(target.target)])


def test_own_decoder_caches_keep_the_target() -> None:
    translate, source = translator(), sources()
    cache = translate.new_cache(4, kind="paged", quantized=True)
    assert all(isinstance(layer, DecoderCache) for layer in cache)
    translate.generate(source, 5, bos=BOS, eos=None, cache=cache)
    assert cache[1].lengths.tolist() == [5] * 4  # bos and all new tokens but the last
    assert cache[1].source is not None and cache[1].source.k.dtype == torch.int8
    assert cache[1].source.lengths.tolist() == (source != PAD).sum(1).tolist()
