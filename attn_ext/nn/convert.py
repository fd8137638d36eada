"""torch's own attention modules and ours, with the same weights: `from_torch` and back with `to_torch`.

What differs in the calls: ours are batch first, return `(output, weights)` with the weights of every head, and
a bool mask means True = may attend where torch's means True = hidden (`masks.from_torch` and
`masks.from_torch_key_padding_mask` turn one into the other).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_ext.nn.attention import MultiHeadAttention
from attn_ext.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)

__all__ = ["from_torch", "to_torch"]

_Ours = (
    MultiHeadAttention
    | TransformerEncoderBlock
    | TransformerDecoderBlock
    | TransformerEncoder
    | TransformerDecoder
)


@overload
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer) -> TransformerEncoderBlock: ...
@overload
def from_torch(module: nn.TransformerDecoderLayer) -> TransformerDecoderBlock: ...
@overload
def from_torch(module: nn.TransformerEncoder) -> TransformerEncoder: ...
@overload
def from_torch(module: nn.TransformerDecoder) -> TransformerDecoder: ...
def from_torch(module: nn.Module) -> _Ours:
    """Our twin of one of torch's attention modules.

    | torch | attn_ext.nn |
    |---|---|
    | `nn.MultiheadAttention`, packed or with kdim/vdim, with or without bias | `MultiHeadAttention` |
    | `nn.TransformerEncoderLayer` | `TransformerEncoderBlock` |
    | `nn.TransformerDecoderLayer` | `TransformerDecoderBlock` with causal=False |
    | `nn.TransformerEncoder`, `nn.TransformerDecoder` | `TransformerEncoder`, `TransformerDecoder` |

    Weights are copied; dtype, device, train/eval mode and requires_grad are those of `module`. A decoder has
    causal=False since torch's sees the future unless it is given a mask; set `block.causal = True` to do without.

    Raises:
        TypeError: a module of another class, or with an activation or norm that ours do not have.
        ValueError: add_bias_kv or add_zero_attn, for which ours have no counterpart; dropouts of one layer that
            differ from one another.
    """
    converter = _FROM_TORCH.get(type(module))
    if converter is None:
        choices = ", ".join(f"nn.{known.__name__}" for known in _FROM_TORCH)
        advice = "; convert its encoder and decoder" if isinstance(module, nn.Transformer) else ""
        raise TypeError(f"from_torch: expected one of {choices}, got {_class_name(module)}{advice}")
    return converter(module).train(module.training)


def to_torch(module: _Ours) -> nn.Module:
    """torch's twin of one of our modules, batch first: the way back from `from_torch`.

    Weights are copied; dtype, device, train/eval mode and requires_grad are those of `module`. A decoder's `causal`
    has no place in torch's module: give that one a mask.

    Raises:
        TypeError: a module of another class.
        ValueError: grouped heads, rotary embedding, gated feed-forward nets or RMS norms, which torch's lack.
    """
    converter = _TO_TORCH.get(type(module))
    if converter is None:
        choices = ", ".join(known.__name__ for known in _TO_TORCH)
        raise TypeError(f"to_torch: expected one of {choices}, got {_class_name(module)}")
    return converter(module).train(module.training)


# --- attention ------------------------------------------------------------------------------------------------------


def _attention_from_torch(theirs: nn.MultiheadAttention) -> MultiHeadAttention:
    if theirs.bias_k is not None or theirs.bias_v is not None:
        raise ValueError("from_torch: add_bias_kv=True has no counterpart in MultiHeadAttention")
    if theirs.add_zero_attn:
        raise ValueError("from_torch: add_zero_attn=True has no counterpart in MultiHeadAttention")
    ours = MultiHeadAttention(
        theirs.embed_dim,
        theirs.num_heads,
        theirs.dropout,
        bias=theirs.in_proj_bias is not None,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        **_made_as(theirs.out_proj.weight),
    )
    linears = (ours.w_q, ours.w_k, ours.w_v)
    if theirs.in_proj_weight is not None:
        weights: Iterable[Tensor] = theirs.in_proj_weight.chunk(3)
        trained = [theirs.in_proj_weight.requires_grad] * 3
    else:
        weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        trained = [weight.requires_grad for weight in weights]
    for linear, weight, wants_grad in zip(linears, weights, trained, strict=True):
        _copy(weight, linear.weight, wants_grad)
    if theirs.in_proj_bias is not None:
        for linear, bias in zip(linears, theirs.in_proj_bias.chunk(3), strict=True):
            _copy(bias, linear.bias, theirs.in_proj_bias.requires_grad)
    _copy_parameters(theirs.out_proj, ours.w_o)
    return ours


def _attention_to_torch(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    if ours.num_kv_heads != ours.h:
        raise ValueError(
            f"to_torch: num_kv_heads = {ours.num_kv_heads} for h = {ours.h} has no counterpart in torch"
        )
    if ours.rotary is not None:
        raise ValueError("to_torch: a rotary embedding has no counterpart in nn.MultiheadAttention")
    theirs = nn.MultiheadAttention(
        ours.d_model,
        ours.h,
        ours.dropout,
        bias=ours.w_q.bias is not None,
        kdim=ours.kdim,
        vdim=ours.vdim,
        batch_first=True,
        **_made_as(ours.w_o.weight),
    )
    linears = (ours.w_q, ours.w_k, ours.w_v)
    if theirs.in_proj_weight is not None:
        _copy_joined([linear.weight for linear in linears], theirs.in_proj_weight)
    else:
        separate = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        for linear, weight in zip(linears, separate, strict=True):
            _copy(linear.weight, weight, linear.weight.requires_grad)
    if theirs.in_proj_bias is not None:
        _copy_joined([linear.bias for linear in linears], theirs.in_proj_bias)
    _copy_parameters(ours.w_o, theirs.out_proj)
    return theirs


# --- layers ---------------------------------------------------------------------------------------------------------


def _encoder_block_from_torch(theirs: nn.TransformerEncoderLayer) -> TransformerEncoderBlock:
    ours = TransformerEncoderBlock(**_block_sizes(theirs, ("dropout1", "dropout2")))
    ours.self_attn = from_torch(theirs.self_attn)
    _copy_parts(_parts(theirs, ours, norms=2))
    return ours


def _decoder_block_from_torch(theirs: nn.TransformerDecoderLayer) -> TransformerDecoderBlock:
    sizes = _block_sizes(theirs, ("dropout1", "dropout2", "dropout3"))
    ours = TransformerDecoderBlock(**sizes, causal=False)
    ours.masked_self_attn = from_torch(theirs.self_attn)
    ours.cross_attn = from_torch(theirs.multihead_attn)
    _copy_parts(_parts(theirs, ours, norms=3))
    return ours


def _encoder_block_to_torch(ours: TransformerEncoderBlock) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(**_layer_sizes(ours, ours.self_attn))
    theirs.self_attn = to_torch(ours.self_attn)
    _set_inner_dropout(ours, theirs)
    _copy_parts((mine, yours) for yours, mine in _parts(theirs, ours, norms=2))
    return theirs


def _decoder_block_to_torch(ours: TransformerDecoderBlock) -> nn.TransformerDecoderLayer:
    theirs = nn.TransformerDecoderLayer(**_layer_sizes(ours, ours.masked_self_attn))
    theirs.self_attn = to_torch(ours.masked_self_attn)
    theirs.multihead_attn = to_torch(ours.cross_attn)
    _set_inner_dropout(ours, theirs)
    _copy_parts((mine, yours) for yours, mine in _parts(theirs, ours, norms=3))
    return theirs


def _parts(theirs: Any, ours: Any, norms: int) -> list[tuple[nn.Module, nn.Module]]:
    """The linear maps and norms of torch's layer beside ours."""
    pairs = [(theirs.linear1, ours.ffn[0]), (theirs.linear2, ours.ffn[2])]
    return pairs + [(getattr(theirs, f"norm{n}"), getattr(ours, f"norm{n}")) for n in range(1, norms + 1)]


def _block_sizes(theirs: Any, residual_dropouts: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that build our block for a layer of torch's."""
    probabilities = {name: getattr(theirs, name).p for name in residual_dropouts}
    if len(set(probabilities.values())) > 1:
        raise ValueError(f"from_torch: the layer's dropouts differ: {probabilities}; our blocks have one")
    for n, _ in enumerate(residual_dropouts, start=1):
        if type(getattr(theirs, f"norm{n}")) is not nn.LayerNorm:
            name = _class_name(getattr(theirs, f"norm{n}"))
            raise TypeError(f"from_torch: norm{n} must be nn.LayerNorm, got {name}")
    return {
        "d_model": theirs.linear1.in_features,
        "h": theirs.self_attn.num_heads,
        "d_ff": theirs.linear1.out_features,
        "dropout": probabilities["dropout1"],
        "norm_first": theirs.norm_first,
        "activation": _activation_name(theirs.activation),
        "norm_eps": theirs.norm1.eps,
        "bias": theirs.linear1.bias is not None,
        "ffn_dropout": theirs.dropout.p,
        **_made_as(theirs.linear1.weight),
    }


def _layer_sizes(ours: Any, attention: MultiHeadAttention) -> dict[str, Any]:
    """The arguments that build torch's layer for a block of ours."""
    if not isinstance(ours.ffn, nn.Sequential):
        raise ValueError(
            f"to_torch: the gated feed-forward net {ours.ffn.activation} has no counterpart in torch"
        )
    if type(ours.norm1) is not nn.LayerNorm:
        raise ValueError(f"to_torch: {_class_name(ours.norm1)} has no counterpart in torch's layers")
    activation, _ = _activation_and_dropout(ours)
    return {
        "d_model": attention.d_model,
        "nhead": attention.h,
        "dim_feedforward": ours.ffn[0].out_features,
        "dropout": ours.dropout.p,
        "activation": _activation_function(activation),
        "layer_norm_eps": ours.norm1.eps,
        "batch_first": True,
        "norm_first": ours.norm_first,
        "bias": ours.ffn[0].bias is not None,
        **_made_as(ours.ffn[0].weight),
    }


def _activation_name(activation: Any) -> str:
    if activation is F.relu or activation is torch.relu or type(activation) is nn.ReLU:
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if activation is F.silu or type(activation) is nn.SiLU:
        return "silu"
    raise TypeError(
        f"from_torch: the activation must be ReLU, GELU or SiLU as function or module, got {activation!r}"
    )


def _activation_and_dropout(ours: Any) -> tuple[nn.Module, float]:
    inner = ours.ffn[1]
    return (inner[0], inner[1].p) if isinstance(inner, nn.Sequential) else (inner, 0.0)


def _activation_function(activation: nn.Module) -> Callable[[Tensor], Tensor]:
    """As torch's layer keeps it: its fast path looks for these very functions."""
    if type(activation) is nn.ReLU:
        return F.relu
    if type(activation) is nn.GELU and activation.approximate == "none":
        return F.gelu
    return copy.deepcopy(activation)


def _set_inner_dropout(ours: Any, theirs: Any) -> None:
    theirs.dropout.p = _activation_and_dropout(ours)[1]


# --- stacks ---------------------------------------------------------------------------------------------------------

Stack = TypeVar("Stack", TransformerEncoder, TransformerDecoder)


def _encoder_from_torch(theirs: nn.TransformerEncoder) -> TransformerEncoder:
    return _stack_from_torch(theirs, TransformerEncoder)


def _decoder_from_torch(theirs: nn.TransformerDecoder) -> TransformerDecoder:
    return _stack_from_torch(theirs, TransformerDecoder)


def _stack_from_torch(theirs: Any, kind: type[Stack]) -> Stack:
    if theirs.norm is not None and type(theirs.norm) is not nn.LayerNorm:
        raise TypeError(f"from_torch: the last norm must be nn.LayerNorm, got {_class_name(theirs.norm)}")
    layers = [from_torch(layer) for layer in theirs.layers]
    first = theirs.layers[0]
    stack = kind(
        len(layers), first.linear1.in_features, first.self_attn.num_heads, first.linear1.out_features
    )
    stack.layers = nn.ModuleList(layers)
    stack.norm = nn.Identity() if theirs.norm is None else copy.deepcopy(theirs.norm)
    return stack


def _encoder_to_torch(ours: TransformerEncoder) -> nn.TransformerEncoder:
    layers = [to_torch(layer) for layer in ours.layers]
    # Nested tensors are an optimisation of torch's that warns wherever it cannot be used.
    theirs = nn.TransformerEncoder(layers[0], len(layers), _last_norm(ours), enable_nested_tensor=False)
    theirs.layers = nn.ModuleList(layers)
    return theirs


def _decoder_to_torch(ours: TransformerDecoder) -> nn.TransformerDecoder:
    layers = [to_torch(layer) for layer in ours.layers]
    theirs = nn.TransformerDecoder(layers[0], len(layers), _last_norm(ours))
    theirs.layers = nn.ModuleList(layers)
    return theirs


def _last_norm(ours: TransformerEncoder | TransformerDecoder) -> nn.Module | None:
    return None if isinstance(ours.norm, nn.Identity) else copy.deepcopy(ours.norm)


# --- parameters -----------------------------------------------------------------------------------------------------


def _copy(source: Tensor, target: nn.Parameter, requires_grad: bool) -> None:
    with torch.no_grad():
        target.copy_(source)
    target.requires_grad_(requires_grad)


def _copy_joined(sources: list[nn.Parameter], target: nn.Parameter) -> None:
    flags = {source.requires_grad for source in sources}
    if len(flags) > 1:
        raise ValueError(
            "to_torch: torch keeps the three input projections in one parameter, "
            "so either all of w_q, w_k and w_v require grad or none"
        )
    _copy(torch.cat([source.detach() for source in sources]), target, flags.pop())


def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        _copy(theirs, ours, theirs.requires_grad)


def _copy_parts(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    for source, target in pairs:
        _copy_parameters(source, target)


def _made_as(parameter: Tensor) -> dict[str, Any]:
    return {"device": parameter.device, "dtype": parameter.dtype}


def _class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


_FROM_TORCH: dict[type, Callable[[Any], _Ours]] = {
    nn.MultiheadAttention: _attention_from_torch,
    nn.TransformerEncoderLayer: _encoder_block_from_torch,
    nn.TransformerDecoderLayer: _decoder_block_from_torch,
    nn.TransformerEncoder: _encoder_from_torch,
    nn.TransformerDecoder: _decoder_from_torch,
}
_TO_TORCH: dict[type, Callable[[Any], nn.Module]] = {
    MultiHeadAttention: _attention_to_torch,
    TransformerEncoderBlock: _encoder_block_to_torch,
    TransformerDecoderBlock: _decoder_block_to_torch,
    TransformerEncoder: _encoder_to_torch,
    TransformerDecoder: _decoder_to_torch,
}
