"""Real models in transformers: SmolLM2-135M writes the same text, MiniLM gives the same embeddings.

`make real-models` installs what these tests need; without it they skip.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # `bench` is no part of the installed package

from attn_ext.embed import python_topics
from attn_ext.models import MiniLM
from bench import real_models
from bench.common import BenchError

PROMPTS = ["The capital of France is", "In Python, a list comprehension", "Once upon a time there was a"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other at every matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, Any]]:
    try:
        yield real_models.load_smollm2()
    except BenchError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def minilm() -> Any:
    try:
        return real_models.load_minilm()
    except BenchError as missing:
        pytest.skip(str(missing))


def logits_of(model: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


@pytest.mark.slow
def test_smollm2_has_the_same_logits_and_writes_the_same_text_as_sdpa(smollm2: tuple[Any, Any]) -> None:
    hf = real_models.require_integration()
    model, tokenizer = smollm2
    ours = real_models.with_attention(model, "attn_ext")
    assert len(hf.reached(ours).reached) == 30 and len(hf.reached(model).unreached) == 30

    text = tokenizer("\n".join(paragraph.flowing for paragraph in python_topics()[:8]), return_tensors="pt")
    expected = logits_of(model, **text)
    assert expected.shape[1] > 64
    assert float((logits_of(ours, **text) - expected).abs().max()) <= 1e-3

    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert not bool(batch["attention_mask"].all())
    seen = batch["attention_mask"].bool()
    assert float((logits_of(ours, **batch) - logits_of(model, **batch))[seen].abs().max()) <= 1e-3

    how = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    expected_text = tokenizer.batch_decode(model.generate(**batch, **how))
    assert len(set(expected_text)) == len(PROMPTS)
    assert tokenizer.batch_decode(ours.generate(**batch, **how)) == expected_text
    assert tokenizer.batch_decode(ours.generate(**batch, **how, cache=hf.cache(ours.config))) == expected_text
    assert hf.reached(ours).calls >= 30 * 2 * 16


def test_minilm_gives_the_same_embeddings_as_sdpa_and_as_our_own_model(minilm: Any) -> None:
    ours = real_models.with_attention(minilm, "attn_ext")
    texts = [paragraph.flowing for paragraph in python_topics()[:12]]
    ids, mask = real_models.sentence_batch(texts, 48)
    assert not bool(mask.all())
    with torch.no_grad():
        expected = real_models.embed(minilm, ids, mask)
        got = real_models.embed(ours, ids, mask)
        alone = MiniLM.from_folder(real_models.minilm_folder())(ids, mask.sum(dim=1))
    assert float((got - expected).abs().max()) <= 1e-6
    assert float((got - alone).abs().max()) <= 1e-5
    assert float((expected[0] - expected[1]).abs().max()) > 1e-2
    hf = real_models.require_integration()
    assert hf.reached(ours).calls == 6 and not hf.reached(ours).unreached


def test_a_copy_with_other_attention_shares_the_weights(minilm: Any) -> None:
    other = real_models.with_attention(minilm, "eager")
    assert other.config._attn_implementation == "eager" and minilm.config._attn_implementation == "sdpa"
    pairs = zip(other.parameters(), minilm.parameters(), strict=True)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)
