"""Random scripts of calls to each cache, beside a model that keeps plain lists of tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cache_support import Tokens, full_pass
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from attn_ext import KVCache, PagedKVCache, SlidingKVCache

QUERY_HEADS, HEADS, WIDTH, MOST = 2, 1, 3, 40


class Script(RuleBasedStateMachine):
    """What is common: the model is one list of tokens a sequence, each (k, v) of shape (HEADS, WIDTH)."""

    make: Callable[[int], Any]  # an empty cache of so many sequences; each kind below has its own
    cache: Any
    window: tuple[int, int] | None = None

    @initialize(batch=st.integers(1, 3), seed=st.integers(0, 2**16))
    def start(self, batch: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.cache = self.make(batch)
        self.model: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def fits(self, counts: list[int]) -> bool:
        """Whether the cache has to take so many more tokens."""
        return True

    def add(self, counts: list[int], k: Tensor, v: Tensor) -> None:
        """k, v (total, HEADS, WIDTH) go to the model."""
        rows = iter(zip(k.unbind(), v.unbind(), strict=True))
        for sequence, n in zip(self.model, counts, strict=True):
            sequence.extend(next(rows) for _ in range(n))

    def expected(self, b: int, q: Tensor) -> Tensor:
        """q (QUERY_HEADS, n, WIDTH) attends to all of sequence b."""
        if self.model[b]:
            k, v = (torch.stack(x, 1) for x in zip(*self.model[b], strict=True))
        else:
            k = v = torch.zeros(HEADS, 0, WIDTH)
        return full_pass(Tokens(q, k, v), None, window=self.window)[0]

    @rule(data=st.data(), attend=st.booleans())
    def tokens_come(self, data: st.DataObject, attend: bool) -> None:
        counts = [data.draw(st.integers(0, 9)) for _ in self.model]
        self.come(counts, attend)

    @rule(attend=st.booleans(), n=st.integers(0, 2))
    def every_sequence_gets_as_many(self, attend: bool, n: int) -> None:
        self.come([n] * len(self.model), attend, packed=False)

    def come(self, counts: list[int], attend: bool, packed: bool = True) -> None:
        total = sum(counts)
        q = self.draw(total, QUERY_HEADS, WIDTH)
        k, v = self.draw(total, HEADS, WIDTH), self.draw(total, HEADS, WIDTH)
        cu = torch.tensor([0, *counts]).cumsum(0)
        given, options = (q, k, v), {"cu_seqlens": cu}
        if not packed:
            given = tuple(
                x.view(len(counts), counts[0] if counts else 0, *x.shape[1:]).transpose(1, 2) for x in given
            )
            options = {}
        if not self.fits(counts):
            before = copy.deepcopy(self.cache)
            with pytest.raises(IndexError):
                if attend:
                    self.cache.attend(*given, **options)
                else:
                    self.cache.append(*given[1:], **options)
            assert torch.equal(self.cache.lengths, before.lengths) and torch.equal(self.cache.k, before.k)
            return
        if not attend:
            assert self.cache.append(*given[1:], **options) is None
            self.add(counts, k, v)
            return
        out = self.cache.attend(*given, **options)
        self.add(counts, k, v)
        for b in range(len(counts)):
            rows = slice(int(cu[b]), int(cu[b + 1]))
            found = out[rows].transpose(0, 1) if packed else out[b]
            want = self.expected(b, q[rows].transpose(0, 1))
            torch.testing.assert_close(found, want, rtol=0, atol=1e-5)

    def may_cut(self, b: int, n: int) -> bool:
        return True

    def note_cut(self, kept: list[int]) -> None:
        pass

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        lengths = [len(sequence) for sequence in self.model]
        kept = [data.draw(st.integers(max(0, n - 7), n) | st.integers(0, n)) for n in lengths]
        if not all(self.may_cut(b, n) for b, n in enumerate(kept)):
            with pytest.raises(ValueError, match="cut to"):
                self.cache.truncate(kept)
            return
        self.cache.truncate(kept)
        self.model = [sequence[:n] for sequence, n in zip(self.model, kept, strict=True)]
        self.note_cut(kept)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        last = len(self.model) - 1
        indices = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=3))
        self.cache.reorder(indices)
        self.model = [list(self.model[b]) for b in indices]
        self.note_reorder(indices)

    def note_reorder(self, indices: list[int]) -> None:
        pass

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.model = [[] for _ in self.model]
        self.note_cut([0] * len(self.model))

    @rule()
    def copy(self) -> None:
        old, self.cache = self.cache, copy.deepcopy(self.cache)
        for t in old._storage.data:
            t.fill_(77)  # nothing of the old one may show

    @invariant()
    def the_last_query_sees_what_the_model_holds(self) -> None:
        assert self.cache.lengths.tolist() == [len(sequence) for sequence in self.model]
        q = self.draw(len(self.model), QUERY_HEADS, 1, WIDTH)
        if not self.last_can_be_seen():
            return
        out = self.cache.attend(q)
        for b in range(len(self.model)):
            torch.testing.assert_close(out[b], self.expected(b, q[b]), rtol=0, atol=1e-5)

    def last_can_be_seen(self) -> bool:
        return True


class ContiguousScript(Script):
    def make(self, batch: int) -> KVCache:
        return KVCache(batch, HEADS, WIDTH, capacity=2, max_capacity=MOST)

    def fits(self, counts: list[int]) -> bool:
        return all(len(s) + n <= MOST for s, n in zip(self.model, counts, strict=True))

    @rule(capacity=st.integers(0, MOST))
    def reserve(self, capacity: int) -> None:
        self.cache.reserve(capacity)
        assert self.cache.capacity >= capacity


class PagedScript(Script):
    PAGE, BLOCKS = 3, 20

    def make(self, batch: int) -> PagedKVCache:
        return PagedKVCache(batch, HEADS, WIDTH, page_size=self.PAGE, num_blocks=1, max_blocks=self.BLOCKS)

    def fits(self, counts: list[int]) -> bool:
        """By the cache's own lists, which `blocks_are_counted` checks: what is missing, and copies of shared blocks."""
        needed, owners = 0, Counter(block for blocks in self.cache._blocks for block in blocks)
        for blocks, sequence, n in zip(self.cache._blocks, self.model, counts, strict=True):
            for page in sorted({p // self.PAGE for p in range(len(sequence), len(sequence) + n)}):
                if page >= len(blocks):
                    needed += 1
                elif owners[blocks[page]] > 1:
                    owners[blocks[page]] -= 1
                    needed += 1
        return needed <= self.BLOCKS - len({block for blocks in self.cache._blocks for block in blocks})

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        numbers = list(range(len(self.model)))
        source = data.draw(st.sampled_from(numbers))
        targets = data.draw(st.lists(st.sampled_from([b for b in numbers if b != source])))
        length = data.draw(st.none() | st.integers(0, len(self.model[source])))
        self.cache.share(source, targets, length)
        for b in targets:
            self.model[b] = self.model[source][:length]

    @rule(capacity=st.integers(0, 12))
    def reserve(self, capacity: int) -> None:
        if self.fits([max(0, capacity - len(sequence)) for sequence in self.model]):
            self.cache.reserve(capacity)
            assert self.cache.capacity >= capacity
        else:
            with pytest.raises(IndexError, match="allowed"):
                self.cache.reserve(capacity)

    @invariant()
    def blocks_are_counted(self) -> None:
        cache = self.cache
        held = Counter(block for blocks in cache._blocks for block in blocks)
        assert [held[n] for n in range(cache.num_blocks)] == cache._owners
        assert sorted(cache._free) == [n for n in range(cache.num_blocks) if not held[n]]
        for row, blocks, sequence in zip(cache.block_table.tolist(), cache._blocks, self.model, strict=True):
            assert row == blocks + [-1] * (len(row) - len(blocks))
            assert len(blocks) * self.PAGE >= len(sequence)


class SlidingScript(Script):
    WINDOW, CAPACITY = 3, 7
    window = (WINDOW - 1, 0)

    def make(self, batch: int) -> SlidingKVCache:
        # The position that stands in each slot, of each sequence.
        self.slots: list[dict[int, int]] = [{} for _ in range(batch)]
        return SlidingKVCache(batch, HEADS, WIDTH, window=self.WINDOW, capacity=self.CAPACITY)

    def add(self, counts: list[int], k: Tensor, v: Tensor) -> None:
        for slots, sequence, n in zip(self.slots, self.model, counts, strict=True):
            slots.update((p % self.CAPACITY, p) for p in range(len(sequence), len(sequence) + n))
        super().add(counts, k, v)

    def there(self, b: int, positions: range) -> bool:
        return all(self.slots[b].get(p % self.CAPACITY) == p for p in positions)

    def may_cut(self, b: int, n: int) -> bool:
        """Whether all that the next query will see is there."""
        return n == len(self.model[b]) or self.there(b, range(max(0, n - self.WINDOW + 1), n))

    def note_cut(self, kept: list[int]) -> None:
        self.slots = [
            {slot: p for slot, p in slots.items() if p < n} for slots, n in zip(self.slots, kept, strict=True)
        ]

    def note_reorder(self, indices: list[int]) -> None:
        self.slots = [dict(self.slots[b]) for b in indices]

    def last_can_be_seen(self) -> bool:
        """After a cut the last token may see one key more than the next one will, and that may be gone."""
        for b, sequence in enumerate(self.model):
            n = len(sequence)
            if not self.there(b, range(max(0, n - self.WINDOW), n)):
                with pytest.raises(ValueError, match="hold them from"):
                    self.cache.attend(self.draw(len(self.model), QUERY_HEADS, 1, WIDTH))
                return False
        return True


BRIEF = settings(max_examples=40, stateful_step_count=15, deadline=None)

for script in (ContiguousScript, PagedScript, SlidingScript):
    script.TestCase.settings = BRIEF

TestContiguousScripts = ContiguousScript.TestCase
TestPagedScripts = PagedScript.TestCase
TestSlidingScripts = SlidingScript.TestCase
