"""How a model writes: which token comes next, when a row ends, and what happens to the caches meanwhile.

`decode` does it for every model. What a model brings is the logits of the first new token, and a function that reads
tokens into its caches and gives the logits of the next ones. Nothing else is known of it here.

Letters: B rows, V tokens in the vocabulary, K beams a row.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import LogitsError

__all__ = [
    "Decoding",
    "Prompt",
    "decode",
    "is_token",
    "next_token_probabilities",
    "one_each",
    "read_prompt",
    "row_seed",
    "writing",
]


class Reorderable(Protocol):
    """What decoding asks of a cache."""

    def reorder(self, indices: Sequence[int] | Tensor) -> None: ...


class Read(Protocol):
    """Reads one token into each of the rows `active` (n,) of the caches, in order: tokens (n,) → logits (n, V)."""

    def __call__(self, tokens: Tensor, active: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens, and when to stop; checked as it is made.

    Attributes:
        who: the function that was called, for messages.
        vocab_size: V.
        max_new_tokens: no row gets more.
        temperature: 0 takes the likeliest token, otherwise logits are divided by it and a token is drawn.
        top_k, top_p: draw only from the likeliest; see `next_token_probabilities`.
        num_beams: K; above 1, beam search.
        length_penalty: beams are compared by log-probability / tokens ** length_penalty; −10 to 10.
        eos: tokens that end a row.
        pad: what a row that has ended goes on with.
        seed: where the random streams of the rows start: a number for all or one a row; see `row_seed`.
        callback: called with each step's tokens (B,).

    Raises:
        ValueError: a setting that means nothing. The message names it.
    """

    who: str
    vocab_size: int
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    eos: int | Sequence[int] | None = None
    pad: int | None = None
    seed: int | Sequence[int] | None = None
    callback: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        self._expect(_is_whole(self.max_new_tokens, 0), "max_new_tokens", "an integer of at least 0")
        fine = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        self._expect(fine, "temperature", "a number of at least 0")
        self._expect(self.top_k is None or _is_whole(self.top_k, 1), "top_k", "an integer of at least 1")
        self._expect(_is_part(self.top_p), "top_p", "above 0 and at most 1")
        self._expect(_is_whole(self.num_beams, 1), "num_beams", "an integer of at least 1")
        # Further out, scores of long texts would leave the range of floats.
        fine = _is_number(self.length_penalty) and -10 <= self.length_penalty <= 10
        self._expect(fine, "length_penalty", "a number from -10 to 10")
        self._expect(self._eos_are_tokens(), "eos", f"tokens from 0 to {self.vocab_size - 1}")
        fine = self.pad is None or (_is_whole(self.pad, -(2**63)) and self.pad < 2**63)
        self._expect(fine, "pad", "an integer of 64 bits")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError(
                f"{self.who}: beams are the likeliest texts and nothing is drawn: num_beams = {self.num_beams} goes "
                f"with temperature 0, got {self.temperature}"
            )
        if self.num_beams > 1 and self.callback is not None:
            raise ValueError(
                f"{self.who}: which tokens are written is only known at the end of a beam search, so that callback "
                f"needs num_beams = 1, got {self.num_beams}"
            )

    def _expect(self, fine: bool, name: str, expected: str) -> None:
        if not fine:
            raise ValueError(f"{self.who}: {name} must be {expected}, got {getattr(self, name)!r}")

    def _eos_are_tokens(self) -> bool:
        try:
            return all(is_token(token, self.vocab_size) for token in self.eos_tokens)
        except TypeError:  # neither one nor several
            return False

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end a row, in a tuple."""
        if self.eos is None:
            return ()
        return (self.eos,) if isinstance(self.eos, Integral) else tuple(self.eos)

    @property
    def pad_token(self) -> int:
        """`pad`, or the first of eos where it was not given. Without eos there is nothing to pad."""
        if self.pad is not None:
            return self.pad
        return self.eos_tokens[0] if self.eos_tokens else 0

    def expect_seeds(self, batch: int) -> None:
        """Raises ValueError where `seeds` would, so that it can be known before anything is written."""
        if self.temperature > 0 and self.seed is not None:
            self.seeds(batch)

    def seeds(self, batch: int) -> list[int]:
        """One for each row's random stream.

        Raises:
            ValueError: neither one for all nor one a row.
        """
        seed = self.seed
        if seed is None:  # torch.manual_seed decides
            seed = int(torch.randint(2**63 - 1, ()))
        if _is_whole(seed, 0):
            return [row_seed(int(seed), b) for b in range(batch)]
        several = isinstance(seed, Sequence) and len(seed) == batch
        if not several or not all(_is_whole(s, 0) and s < 2**64 for s in seed):
            raise ValueError(
                f"{self.who}: seed must be an integer of at least 0, or one below 2**64 for each of {batch} rows, "
                f"got {seed!r}"
            )
        return [int(s) for s in seed]

    def ends(self, tokens: Tensor) -> Tensor:
        """Which of the tokens end a row: bool, shaped as they are."""
        return torch.isin(tokens, torch.tensor(self.eos_tokens, dtype=tokens.dtype, device=tokens.device))


def decode(logits: Tensor, read: Read, caches: Sequence[Reorderable], decoding: Decoding) -> Tensor:
    """Write tokens behind what the caches hold.

    Args:
        logits: (B, V) of the first new token of each row.
        read: see `Read`. Not called for the last token of a row.
        caches: of every layer. Only beams reorder them.
        decoding: how.

    Returns:
        (B, n) int64, where n ≤ max_new_tokens is the length of the longest row. A row ends with one of the eos tokens,
        and goes on with pad.

    Raises:
        ValueError: seeds that are not one a row.
        LogitsError: logits that are NaN, +inf, or −inf for all tokens of a row.
    """
    if decoding.max_new_tokens == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    if decoding.num_beams > 1:
        return _beam_search(logits, read, caches, decoding)
    return _token_by_token(logits, read, decoding)


def _token_by_token(logits: Tensor, read: Read, decoding: Decoding) -> Tensor:
    batch = logits.shape[0]
    pick = _likeliest if decoding.temperature == 0 else _Drawing(decoding, batch)
    active = torch.arange(batch, device=logits.device)  # rows that have not ended
    columns: list[Tensor] = []
    while True:
        picked = pick(_checked(logits, decoding), active)  # (active,)
        column = torch.full((batch,), decoding.pad_token, device=logits.device)
        column[active] = picked
        columns.append(column)
        if decoding.callback is not None:
            decoding.callback(column.clone())
        goes_on = ~decoding.ends(picked)
        active, picked = active[goes_on], picked[goes_on]
        if not len(active) or len(columns) == decoding.max_new_tokens:
            return torch.stack(columns, dim=1)
        logits = read(picked, active)  # (active, V)


def _checked(logits: Tensor, decoding: Decoding) -> Tensor:
    largest = logits.amax(-1)  # NaN where a logit is
    if not largest.isfinite().all():
        found = "NaN" if largest.isnan().any() else "infinite" if largest.isposinf().any() else "all -inf"
        raise LogitsError(f"{decoding.who}: the model's logits are {found}, so that no token can be chosen")
    return logits


# --- drawing --------------------------------------------------------------------------------------------------------


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """What a token is drawn from.

    softmax(logits / temperature), of which only the top_k likeliest tokens are left, and of these only the likeliest
    ones that together reach top_p (Holtzman et al. 2020, arXiv:1904.09751). What is left sums to 1. Of equal tokens the
    lower number counts as the likelier one.

    Args:
        logits: (…, V). Tokens of −inf are never drawn; the largest of a row must be finite.
        temperature: above 0; what logits are divided by. The smaller, the surer the likeliest token.
        top_k: at least 1; all tokens where not given.
        top_p: above 0 and at most 1; all tokens where not given.

    Returns:
        (…, V) float64.

    Raises:
        ValueError: another temperature, top_k or top_p.
    """
    for name, value, expected, fine in (
        (
            "temperature",
            temperature,
            "a finite number above 0",
            _is_number(temperature) and 0 < temperature < math.inf,
        ),
        ("top_k", top_k, "an integer of at least 1", top_k is None or _is_whole(top_k, 1)),
        ("top_p", top_p, "above 0 and at most 1", _is_part(top_p)),
    ):
        if not fine:
            raise ValueError(f"next_token_probabilities: {name} must be {expected}, got {value!r}")
    exact = logits.double()
    scaled = (
        exact - exact.amax(-1, keepdim=True)
    ) / temperature  # the largest is 0, so that nothing overflows
    if top_k is None and top_p is None:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        ordered[..., min(top_k, ordered.shape[-1]) :] = -math.inf
    kept = ordered.softmax(-1)
    if top_p is not None and top_p < 1:  # a sum may reach 1 by rounding before its last terms
        before = kept.cumsum(-1) - kept  # what the likelier ones reach without this one
        kept = kept.masked_fill(before >= top_p, 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row`'s random stream where `seed` was given for all.

    With it a row can be written again by itself: `generate(tokens[3:4], n, seed=[row_seed(7, 3)])` draws what row 3 of
    `generate(tokens, n, seed=7)` drew.
    """
    return int(np.random.SeedSequence((seed, row)).generate_state(1, np.uint64)[0] >> 1)


def _likeliest(logits: Tensor, active: Tensor) -> Tensor:
    return logits.argmax(-1)


class _Drawing:
    """Draws tokens, each row from a random stream of its own."""

    def __init__(self, decoding: Decoding, batch: int) -> None:
        self.decoding = decoding
        self.generators = [torch.Generator().manual_seed(s) for s in decoding.seeds(batch)]

    def __call__(self, logits: Tensor, active: Tensor) -> Tensor:
        how = self.decoding
        reached = next_token_probabilities(logits, how.temperature, how.top_k, how.top_p).cumsum(-1)
        whole = reached[:, -1:]
        uniform = torch.stack(
            [torch.rand(1, generator=self.generators[row], dtype=torch.float64) for row in active.tolist()]
        ).to(logits.device)
        # The first token at which the sum passes the number drawn, which rounding must not lift to the whole sum.
        point = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
        return torch.searchsorted(reached, point, right=True)[:, 0]


# --- beams ----------------------------------------------------------------------------------------------------------


def _beam_search(logits: Tensor, read: Read, caches: Sequence[Reorderable], decoding: Decoding) -> Tensor:
    """The likeliest of the texts that K beams a row come upon, by log-probability / tokens ** length_penalty.

    In each step the K · V continuations of a row's beams are ranked. Those among the first K that end are finished
    texts; the first K that do not are the new beams. A row is done when no beam can become better than its best text.
    """
    batch, vocab = logits.shape
    K, most, device = decoding.num_beams, decoding.max_new_tokens, logits.device
    found = torch.full((batch, most), decoding.pad_token, device=device)
    found_score = torch.full((batch,), -math.inf, dtype=torch.float64, device=device)
    found_length = torch.zeros(batch, dtype=torch.int64, device=device)

    rows = torch.arange(batch, device=device)  # those that are not done
    beam_of = rows.repeat_interleave(K)
    _reorder(caches, beam_of, batch)
    logits = logits.index_select(0, beam_of)
    written = torch.empty(batch, K, 0, dtype=torch.int64, device=device)
    scores = torch.full((batch, K), -math.inf, dtype=torch.float64, device=device)
    scores[:, 0] = 0.0  # at first all beams of a row are the same, so that one alone may count

    for length in range(1, most + 1):
        log_p = _checked(logits, decoding).double().log_softmax(-1).view(len(rows), K, vocab)
        ranked, index = (
            (scores[..., None] + log_p).flatten(1).topk(min(K * (1 + len(decoding.eos_tokens)), K * vocab))
        )  # enough to hold K that do not end
        parent, token = index.div(vocab, rounding_mode="floor"), index % vocab  # (rows, candidates)

        ends = decoding.ends(token)
        finished = torch.ones_like(ends) if length == most else ends.clone()
        finished[:, K:] = False
        score, which = (ranked / length**decoding.length_penalty).masked_fill(~finished, -math.inf).max(1)
        better = (score > found_score[rows]).nonzero()[:, 0]
        taken, text = rows[better], which[better]
        found[taken, : length - 1] = written[better, parent[better, text]]
        found[taken, length - 1] = token[better, text]
        found_score[taken], found_length[taken] = score[better], length
        if length == most:
            break

        scores, chosen = ranked.masked_fill(ends, -math.inf).topk(K)
        parent, token = parent.gather(1, chosen), token.gather(1, chosen)
        written = torch.cat(
            [written.gather(1, parent[..., None].expand_as(written)), token[..., None]], dim=-1
        )
        # Log-probabilities only fall, so this is the best that the best beam can reach.
        end = most if decoding.length_penalty > 0 else length + 1
        goes_on = scores[:, 0] / end**decoding.length_penalty > found_score[rows]
        beam_of = (torch.arange(len(rows), device=device)[:, None] * K + parent)[goes_on].flatten()
        _reorder(caches, beam_of, len(rows) * K)
        rows, scores, written = rows[goes_on], scores[goes_on], written[goes_on]
        if not len(rows):
            break
        logits = read(token[goes_on].flatten(), torch.arange(len(beam_of), device=device))
    return _padded(found, found_length, decoding.pad_token)


def _reorder(caches: Sequence[Reorderable], rows: Tensor, held: int) -> None:
    if not torch.equal(rows, torch.arange(held, device=rows.device)):
        for cache in caches:
            cache.reorder(rows)


def _padded(tokens: Tensor, lengths: Tensor, pad: int) -> Tensor:
    """Pad behind the length of each row, and no column that holds nothing else."""
    tokens = tokens[:, : int(lengths.max()) if len(lengths) else 0]
    behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    return tokens.masked_fill(behind, pad)


# --- prompts --------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """The tokens that a batch begins with, without its padding."""

    tokens: Tensor  # (B, L), or packed (total,)
    cu_seqlens: Tensor | None  # (B + 1,) where they are packed
    lengths: list[int]  # tokens of each row


def read_prompt(
    who: str, tokens: Tensor, mask: Tensor | None, vocab_size: int, *, name: str = "tokens"
) -> Prompt:
    """Check a batch of prompts and leave out what the mask says is padding.

    Args:
        tokens: (B, L) integers; what they are in padding does not matter.
        mask: (B, L) bool, True = token; None where there is no padding.
        name: what the tokens are called in messages.

    Raises:
        TypeError: tokens that are no integers, a mask that is not bool.
        ValueError: other shapes, a row without tokens, tokens outside of the vocabulary.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        found = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{who}: {name} must be a tensor of int32 or int64, got {found}")
    if tokens.dim() != 2:
        raise ValueError(f"{who}: {name} must be (B, L), got {tuple(tokens.shape)}")
    batch, length = tokens.shape
    lengths = [length] * batch
    cu_seqlens = None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{who}: mask must be a bool tensor, True where a token stands, got {found}")
        if mask.shape != tokens.shape:
            raise ValueError(f"{who}: mask must be {(batch, length)} as tokens are, got {tuple(mask.shape)}")
        if not mask.all():
            counts = mask.sum(dim=1)
            lengths, cu_seqlens = counts.tolist(), F.pad(counts.cumsum(0), (1, 0))
            tokens = tokens[mask]
    for row, n in enumerate(lengths):
        if n == 0:
            raise ValueError(f"{who}: row {row} has no token to begin with")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(
            f"{who}: {name} must be 0 to {vocab_size - 1}, got {int(tokens.min())} to {int(tokens.max())}"
        )
    return Prompt(tokens, cu_seqlens, lengths)


def one_each(tokens: Tensor, active: Tensor, batch: int) -> tuple[Tensor, Tensor | None]:
    """One new token for some rows of a batch: (B, 1) for all of them, or packed (n,) with cu_seqlens (B + 1,)."""
    if len(active) == batch:
        return tokens[:, None], None
    counts = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    counts[active] = 1
    return tokens, F.pad(counts.cumsum(0), (1, 0))


# --- around it ------------------------------------------------------------------------------------------------------

_writing: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def writing(model: nn.Module) -> Iterator[None]:
    """Run a block with the model in eval mode and without gradients; then every module is as it was.

    Where several threads write with one model, the last to end brings its training mode back.
    """
    with _lock:
        depth, trained = _writing.get(model, (0, []))
        if depth == 0:
            trained = [module for module in model.modules() if module.training]
            for module in trained:
                module.training = False
        _writing[model] = (depth + 1, trained)
    try:
        with torch.no_grad():
            yield
    finally:
        with _lock:
            depth, trained = _writing.pop(model)
            if depth > 1:
                _writing[model] = (depth - 1, trained)
            else:
                for module in trained:
                    module.training = True


def is_token(x: object, vocab_size: int) -> bool:
    """Whether x is one of the tokens 0 … vocab_size − 1."""
    return _is_whole(x, 0) and x < vocab_size


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_part(x: Any) -> bool:
    """Whether x may be top_p."""
    return x is None or (_is_number(x) and 0 < x <= 1)


def _is_whole(x: object, least: int | None = None) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and (least is None or x >= least)
