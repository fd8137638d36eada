"""`override_sdpa`: torch's own attention calls run our kernels, and the code that makes them stays as it is.

Four doors lead to attention in torch, and each has its own handle here:

- `F.scaled_dot_product_attention`, by whatever name and from C++ too, ends in the operator
  `aten::scaled_dot_product_attention`. Its kernel in torch's dispatcher is replaced (`torch.library`).
- The fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder` in evaluation ends in the operator
  `aten::_native_multi_head_attention`, with padded tensors or with nested ones. Its CPU kernels are replaced.
- `nn.MultiheadAttention` off the fast path and with `need_weights=True` multiplies matrices by itself in
  `F.multi_head_attention_forward`. That name is wrapped.
- `torch.compile` reads the Python function, not the dispatcher. Dynamo is taught to read `_compiled_sdpa` instead.

Whatever torch would refuse, and whatever our kernels do not take, goes to torch's own kernel with the arguments as
they came: results, errors and messages are torch's, and the call is counted with the reason.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from attn_ext import ops

__all__ = ["Calls", "override_sdpa"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SDPA = "aten::scaled_dot_product_attention"
_MHA = "aten::_native_multi_head_attention"
_MATH = torch.nn.attention.SDPBackend.MATH.value
_STRIDED = torch.strided
_LARGEST = sys.float_info.max
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
_torch_sdpa = F.scaled_dot_product_attention  # the builtin; nobody's name for it is replaced
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active


@dataclass
class Calls:
    """What happened to torch's attention calls while an `override_sdpa` was on, from any thread."""

    served: int = 0  #: calls that ran our kernels
    compiled: int = 0  #: calls that torch.compile built in; counted when they are traced, not when they run
    passed_on: Counter[str] = field(default_factory=Counter)  #: reason → calls that went to torch's kernels

    def __str__(self) -> str:
        lines = [f"{self.served} served, {self.compiled} compiled, {self.passed_on.total()} passed on"]
        return "\n".join(lines + [f"{n:8}  {reason}" for reason, n in self.passed_on.most_common()])


class override_sdpa:  # noqa: N801  a context manager in torch's style, as torch.no_grad
    """Runs every attention call of torch on CPU tensors with our kernels, as long as it is on.

        with override_sdpa() as calls:          # a block
            model(x)
        print(calls)                            # 24 served, 0 compiled, 0 passed on

        @override_sdpa()                        # a function, a coroutine function or a generator function
        def evaluate(model, x): ...

        override_sdpa().enable()                # the process, until .disable()

    Served are `F.scaled_dot_product_attention` under any name (also from C++, TorchScript and programs of
    torch.export), `nn.MultiheadAttention` with and without weights, and the fast path of `nn.TransformerEncoder`,
    nested tensors included; under autograd, autocast, inference mode and torch.compile. Gradients of gradients and of
    a learned `attn_mask` work too.

    Everything else is passed on to torch's own kernels with unchanged arguments, and counted with the reason: other
    devices, dtypes and layouts, tensor subclasses, forward-mode AD and torch.func, empty tensors, is_causal beside a
    mask, weights after dropout (nn.MultiheadAttention in training), and whatever torch answers with an error. Not seen,
    and so not counted: attention that other code computes by itself with matrix products; torch's fused operators
    called directly; jagged nested tensors, which bring their own implementation.

    Results agree with torch's to rounding, with these differences: dropout draws other random numbers (from the same
    generator); a hidden key that holds NaN or Inf does not reach the rows that cannot see it; is_causal with a scale
    of 0 or less gives numbers where torch's kernel gives NaN; and in compiled code the memory order of the output is
    always that of the query, while torch's unfused kernel returns it contiguous.

    One switch serves the whole process, so all threads see it; it is off when the last of several nested or
    concurrent users has left, exceptions included, and then torch's kernels and functions stand where they stood.
    Switch on and off while no other thread runs attention: torch's dispatcher changes without a lock for its readers.

    torch.compile: each compiled function carries a guard on the switch. What was compiled while it was off runs torch's
    kernels, what was compiled while it was on runs ours; where the switch has changed, the function is compiled once
    more, and both versions are kept. Code compiled before the very first use has no guard and is forgotten at that use
    (torch.compiler.reset()). A function that holds the block, or is decorated, compiles with fullgraph=True; the block
    then yields counts that stay 0. Compiled calls are counted when they are traced, not when they run. Weights of
    nn.MultiheadAttention off the fast path stay torch's in compiled code. torch.export, torch.jit and other tracers on
    fake tensors record torch's scaled_dot_product_attention, which is served whenever it runs while the switch is on;
    torch.export(strict=True) and tracers on real tensors record ours while it is on, and keep it. torch.jit.script of
    nn.MultiheadAttention has to be called while it is off.
    """

    def __init__(self) -> None:
        self._entered: list[tuple[Calls, bool]] = []

    def __enter__(self) -> Calls:
        if _compiling():  # Dynamo reads this, and the switch is a variable of the function it compiles
            self._entered.append((_UNCOUNTED, _switch.on))
            _switch.on = True
            return _UNCOUNTED
        calls = Calls()
        _switch.open(calls)
        self._entered.append((calls, False))
        return calls

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        calls, was_on = self._entered.pop()
        if calls is _UNCOUNTED:
            _switch.on = was_on
        else:
            _switch.close(calls)

    def enable(self) -> Calls:
        """Switches on for the process, until `disable`. Returns the counts.

        Raises:
            RuntimeError: this object is on already.
        """
        if self._entered:
            raise RuntimeError("override_sdpa().enable(): this one is on already")
        return self.__enter__()

    def disable(self) -> None:
        """Switches off what `enable` of the same object switched on.

        Raises:
            RuntimeError: this object is not on.
        """
        if not self._entered:
            raise RuntimeError("override_sdpa().disable(): this one is not on")
        self.__exit__(None, None, None)

    def __call__(self, function: _Function) -> _Function:
        """Decorates: on while the function runs, a coroutine until it returns, a generator while it is being resumed.

        Raises:
            TypeError: what came is a class, a module, an async generator function or no function at all.
        """
        if isinstance(function, (type, torch.nn.Module)) or not callable(function):
            raise TypeError(
                f"override_sdpa() decorates functions, not {_describe(function)}; "
                "for one module: model.forward = override_sdpa()(model.forward)"
            )
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                "override_sdpa() cannot decorate an async generator function; use a with block inside"
            )

        wrapped: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with override_sdpa():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return _resume_inside(function(*args, **kwargs))

        else:

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with override_sdpa():
                    return function(*args, **kwargs)

        return functools.wraps(function)(wrapped)  # type: ignore[return-value]


def _describe(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _resume_inside(generator: Any) -> Any:
    """The same generator, with the override on while it runs and off while its consumer does."""
    step, value = generator.send, None
    while True:
        try:
            with override_sdpa():
                item = step(value)
        except StopIteration as stop:
            return stop.value
        try:
            step, value = generator.send, (yield item)
        except GeneratorExit:
            with override_sdpa():
                generator.close()
            raise
        except BaseException as error:  # thrown in by the consumer
            step, value = generator.throw, error


# --- the switch -----------------------------------------------------------------------------------------------------


class _Switch:
    """Whether the process is overridden, and what it takes to change that."""

    def __init__(self) -> None:
        self.on = False  # compiled code has a guard on this
        self._users: tuple[Calls, ...] = ()
        self._lock = threading.RLock()
        self._library: torch.library.Library | None = None
        self._torch_mha_forward: Callable[..., Any] | None = None

    def open(self, calls: Calls) -> None:
        with self._lock:
            if not self._users:
                _teach_dynamo()
                self._replace()
            self._users += (calls,)
            self.on = True

    def close(self, calls: Calls) -> None:
        with self._lock:
            self._users = tuple(user for user in self._users if user is not calls)
            if not self._users:
                self.on = False
                self._restore()
                _forget_dynamo_import()

    def count(self, reason: str | None, compiled: bool = False) -> None:
        with self._lock:
            for calls in self._users:
                if reason is not None:
                    calls.passed_on[reason] += 1
                elif compiled:
                    calls.compiled += 1
                else:
                    calls.served += 1

    def _replace(self) -> None:
        kernels = [  # the kernel of CompositeImplicitAutograd is the one of every backend
            (_SDPA, "CompositeImplicitAutograd", _sdpa_kernel(torch.library.get_kernel(_SDPA, "CPU"))),
            (_SDPA, "FuncTorchVmapMode", _vmap_kernel(torch.library.get_kernel(_SDPA, "FuncTorchVmapMode"))),
            (_MHA, "CPU", _mha_kernel(torch.library.get_kernel(_MHA, "CPU"))),
            (_MHA, "NestedTensorCPU", _nested_mha_kernel(torch.library.get_kernel(_MHA, "NestedTensorCPU"))),
        ]
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, key, kernel in kernels:
                if _dynamo_taught:  # else it is compiled wherever a compiled function turns to eager mode
                    kernel = torch.compiler.disable(kernel)
                self._library.impl(name.removeprefix("aten::"), kernel, key, with_keyset=True)
        self._torch_mha_forward = F.multi_head_attention_forward
        F.multi_head_attention_forward = _wrap_mha_forward(self._torch_mha_forward)

    def _restore(self) -> None:
        F.multi_head_attention_forward = self._torch_mha_forward
        self._library._destroy()
        self._library = self._torch_mha_forward = None


_switch = _Switch()
_UNCOUNTED = Calls()  # what a block inside compiled code yields


# --- scaled_dot_product_attention -----------------------------------------------------------------------------------


def _sdpa_kernel(torch_kernel: Any) -> Callable[..., Tensor]:
    """The kernel of `aten::scaled_dot_product_attention`, below autocast and above autograd."""

    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        reason = _why_special(query, key, value, attn_mask) or _why_not(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if reason is None:
            _switch.count(None)
            if _grad_enabled() and not keys.has(
                _AUTOGRAD
            ):  # called by the kernel of another operator, below autograd
                with torch.no_grad():
                    return _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if reason != _TRACED:
            _switch.count(reason)
        return torch_kernel.call_boxed(
            keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return kernel


def _vmap_kernel(torch_kernel: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        _switch.count("torch.func transform")
        return torch_kernel.call_boxed(keys, *args, **kwargs)

    return kernel


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if not _wanted.weights:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        out = ops.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if not out.is_contiguous() and _MATH == torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        ):
            return out.contiguous()  # as torch's unfused kernel leaves it; somebody may call .view
        return out
    out, lse, weights = ops.attention(  # for `_wrap_mha_forward`, which knows that the shapes are simple
        query, key, value, mask=attn_mask, scale=scale, return_lse=True, return_weights=True
    )
    out, weights = _nan_where_nothing_is_seen(out, lse, weights)
    _wanted.found = weights
    return out


_TRACED = "traced"


def _why_special(*tensors: Tensor | None) -> str | None:
    """Why torch must run the call whatever its shapes are: what eager mode knows and a compiler does not meet."""
    if _functorch_active():
        return "torch.func transform"
    for t in tensors:
        if t is None:
            continue
        if t.is_nested:
            return "nested tensor"
        if type(t) is not Tensor and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return _TRACED if _is_traced(t) else "tensor subclass"
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
            return "forward-mode AD"
    return None


def _is_traced(t: Tensor) -> bool:
    """Whether a tensor stands for one in a graph that is being recorded: nothing runs, so there is nothing to count."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(t, (FakeTensor, FunctionalTensor))


def _why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why our kernels do not take a call: they lack something, or the answer is an error, which torch shall raise."""
    dtype = query.dtype
    for t in (query, key, value, attn_mask):
        if t is None:
            continue
        if not t.is_cpu:
            return f"device {t.device.type}"
        if t.layout is not _STRIDED:
            return f"layout {t.layout}"
    if key.dtype is not dtype or value.dtype is not dtype:
        return "query, key and value of different dtypes"
    if dtype not in _DTYPES:
        return f"dtype {dtype}"
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    rank = len(q_shape)
    if rank < 2 or len(k_shape) < 2 or len(v_shape) < 2:
        return "fewer than two dims"
    if not q_shape == k_shape == v_shape:
        if q_shape[-1] != k_shape[-1] or k_shape[-2] != v_shape[-2]:
            return "shapes that do not fit"
        reason = _why_not_leading(q_shape, k_shape, v_shape, enable_gqa)
        if reason is not None:
            return reason
    if enable_gqa and rank < 3:
        return "shapes that do not fit"
    if query.numel() == 0 or key.numel() == 0 or value.numel() == 0:
        return "empty tensor"
    if not 0.0 <= dropout_p <= 1.0:
        return "dropout_p outside [0, 1]"
    if scale is not None and not -_LARGEST <= scale <= _LARGEST:
        return "scale that is not finite"
    if attn_mask is None:
        return None
    if is_causal:
        return "is_causal beside attn_mask"  # torch's kernels do not agree on it
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        return f"attn_mask of {attn_mask.dtype}"
    return _why_not_mask_shape(
        attn_mask.shape, q_shape, *(() if enable_gqa else (k_shape, v_shape)), Lk=k_shape[-2]
    )


def _why_not_leading(q_shape: Any, k_shape: Any, v_shape: Any, enable_gqa: bool) -> str | None:
    """Judges leading dims: those that are not all the same are shared heads, or are broadcast."""
    if q_shape[:-2] == k_shape[:-2] == v_shape[:-2]:
        return None
    if enable_gqa:
        if len(q_shape) < 3 or not q_shape[:-3] == k_shape[:-3] == v_shape[:-3]:
            return "enable_gqa with other leading dims"
        for shape in (k_shape, v_shape):
            if len(shape) < 3 or shape[-3] == 0 or q_shape[-3] % shape[-3]:
                return "shapes that do not fit"
        return None
    for n in range(3, 1 + max(len(q_shape), len(k_shape), len(v_shape))):
        common = 1
        for shape in (q_shape, k_shape, v_shape):
            size = shape[-n] if len(shape) >= n else 1
            if size != 1 and common != 1 and size != common:
                return "shapes that do not fit"
            common = size if common == 1 else common
    return None


def _why_not_mask_shape(shape: Any, q_shape: Any, *others: Any, Lk: int) -> str | None:
    if len(shape) < 2:
        return "attn_mask of fewer than two dims"
    if len(shape) > max(len(s) for s in (q_shape, *others)):
        return "shapes that do not fit"
    if shape[-1] not in (1, Lk) or shape[-2] not in (1, q_shape[-2]):
        return "shapes that do not fit"
    for n in range(3, 1 + len(shape)):
        if shape[-n] != 1 and shape[-n] not in [s[-n] for s in (q_shape, *others) if len(s) >= n]:
            return "shapes that do not fit"
    return None


# --- the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer ------------------------------------------


def _mha_kernel(torch_kernel: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The kernel of `aten::_native_multi_head_attention` for padded tensors: projections around our attention."""

    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim: int,
        num_head: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        reason = _why_not_mha(query, key, value, embed_dim, num_head, weights, mask, mask_type)
        _switch.count(reason)
        if reason is not None:
            return torch_kernel.call_boxed(
                keys, query, key, value, embed_dim, num_head, *weights,
                mask, need_weights, average_attn_weights, mask_type,
            )  # fmt: skip
        if query is key and key is value:
            q, k, v = _project(query, qkv_weight, qkv_bias, num_head)
        else:  # autocast, too, makes three tensors of one
            parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
            q, k, v = (F.linear(x, w, b).unflatten(-1, (num_head, -1)) for x, w, b in parts)
        out, lse, *rest = ops.attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            mask=_attend(mask, mask_type),
            return_lse=True,
            return_weights=need_weights,
        )
        probabilities = rest[0] if need_weights else None
        if mask is not None:
            out, probabilities = _nan_where_nothing_is_seen(out, lse, probabilities)
        if probabilities is not None and average_attn_weights:
            probabilities = probabilities.mean(1)
        return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), probabilities

    return kernel


def _nested_mha_kernel(torch_kernel: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The same for nested tensors, which hold their sequences one behind the other: attention over packed sequences."""

    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim: int,
        num_head: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        reason = _why_not_nested_mha(query, key, value, embed_dim, num_head, weights, mask, need_weights)
        _switch.count(reason)
        if reason is not None:
            return torch_kernel.call_boxed(
                keys, query, key, value, embed_dim, num_head, *weights,
                mask, need_weights, average_attn_weights, mask_type,
            )  # fmt: skip
        sizes = query._nested_tensor_size()
        ends = F.pad(sizes[:, 0].cumsum(0), (1, 0))
        q, k, v = _project(query.values().view(-1, embed_dim), qkv_weight, qkv_bias, num_head)
        out = F.linear(ops.attention_varlen(q, k, v, ends, ends).flatten(1), proj_weight, proj_bias)
        layout = (sizes, query._nested_tensor_strides(), query._nested_tensor_storage_offsets())
        return torch._nested_view_from_buffer(out.view(-1), *layout), None

    return kernel


def _project(x: Tensor, weight: Tensor, bias: Tensor, num_head: int) -> tuple[Tensor, ...]:
    """(…, E) → q, k, v, each (…, H, D): views of one product."""
    return F.linear(x, weight, bias).unflatten(-1, (3, num_head, -1)).unbind(-3)


def _attend(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """torch's merged mask as ours: its fast path takes every number but 0 as hidden, in float masks too."""
    if mask is None:
        return None
    mask = mask == 0
    return mask[:, None, None, :] if mask_type == 1 else mask


def _nan_where_nothing_is_seen(
    out: Tensor, lse: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Where these paths of torch divide 0 by 0, and ours give 0."""
    dead = (lse == -torch.inf).unsqueeze(-1)
    nan = float("nan")
    return out.masked_fill(dead, nan), None if weights is None else weights.masked_fill(dead, nan)


def _why_not_mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    weights: tuple[Tensor, ...],
    mask: Tensor | None,
    mask_type: int | None,
) -> str | None:
    if query.dim() != 3 or query.shape[-1] != embed_dim or not query.shape == key.shape == value.shape:
        return "shapes that do not fit"
    reason = _why_not_projected(query, key, value, embed_dim, num_head, weights)
    if reason is not None or mask is None:
        return reason
    if mask.device.type != "cpu":
        return f"device {mask.device.type}"
    B, L, _ = query.shape
    if mask_type not in (0, 1, 2) or mask.shape != ((L, L), (B, L), (B, num_head, L, L))[mask_type]:
        return "shapes that do not fit"
    return None


def _why_not_nested_mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    weights: tuple[Tensor, ...],
    mask: Tensor | None,
    need_weights: bool,
) -> str | None:
    if mask is not None or need_weights:
        return "nested tensor with a mask or weights"
    if query is not key or key is not value:
        return "nested tensors that are not self-attention"
    if (
        query.dim() != 3
        or not query.is_contiguous()
        or (query._nested_tensor_size()[:, 1] != embed_dim).any()
    ):
        return "nested tensor of another layout"
    return _why_not_projected(query, key, value, embed_dim, num_head, weights)


def _why_not_projected(
    query: Tensor, key: Tensor, value: Tensor, E: int, num_head: int, weights: tuple[Tensor, ...]
) -> str | None:
    if query.numel() == 0:
        return "empty tensor"
    for t in (query, key, value, *weights):
        if t.dtype != query.dtype or t.dtype not in _DTYPES:
            return f"dtype {t.dtype}"
        if t.device.type != "cpu":
            return f"device {t.device.type}"
    if num_head < 1 or E % num_head or [t.shape for t in weights] != [(3 * E, E), (3 * E,), (E, E), (E,)]:
        return "shapes that do not fit"
    return None


# --- nn.MultiheadAttention with weights, off the fast path ----------------------------------------------------------


class _Wanted(threading.local):
    """Hands weights from the attention kernel out to `_wrap_mha_forward`, past torch's function between the two."""

    weights = False
    found: Tensor | None = None


_wanted = _Wanted()


def _wrap_mha_forward(torch_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, with weights by our kernels.

    torch's function does its projections and merges its masks as it does without weights, and so comes to
    `scaled_dot_product_attention`, which computes the weights besides.
    """
    signature = inspect.signature(torch_forward)
    # Dynamo takes torch's function for an operator and does not look inside; it does read a function of its own.
    readable = types.FunctionType(
        torch_forward.__code__, torch_forward.__globals__, torch_forward.__name__, torch_forward.__defaults__
    )
    readable.__kwdefaults__ = torch_forward.__kwdefaults__

    @functools.wraps(torch_forward)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            if kwargs.get("need_weights", len(args) < 16 or args[15]):
                _count_traced("weights in compiled code")
            return readable(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        if not options["need_weights"] or (options["is_causal"] and options["attn_mask"] is None):
            return torch_forward(*args, **kwargs)  # without weights, or with an error
        if options["training"] and options["dropout_p"] > 0.0:
            _switch.count("weights after dropout")
            return torch_forward(*args, **kwargs)
        # With need_weights the mask is applied as it is, and is_causal is no more than a hint about it.
        out, weights = _with_weights(torch_forward, {**options, "need_weights": False, "is_causal": False})
        if weights is None:  # passed on and counted there
            return torch_forward(*args, **kwargs)
        if options["average_attn_weights"]:
            weights = weights.mean(1)
        return out, weights if options["query"].dim() == 3 else weights.squeeze(0)

    return multi_head_attention_forward


def _with_weights(torch_forward: Callable[..., Any], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    _wanted.weights, _wanted.found = True, None
    try:
        out, _ = torch_forward(**options)
        return out, _wanted.found
    finally:
        _wanted.weights, _wanted.found = False, None


# --- torch.compile --------------------------------------------------------------------------------------------------


def _compiled_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What Dynamo reads in place of the builtin. That it reads `_switch.on` makes the guard."""
    if _switch.on:
        reason = _why_not_compiled(query, key, value) or _why_not(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        _count_traced(reason)
        if reason is None:
            return ops.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if query.is_nested:  # a subclass that knows the function by its name, not the operator
        return _torch_sdpa_in_graph(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _why_not_compiled(*tensors: Tensor) -> str | None:
    if _functorch_traced():
        return "torch.func transform"
    for t in tensors:
        if t.is_nested:
            return "nested tensor"
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return "tensor subclass"
    return None


def _torch_sdpa_in_graph(*args: Any, **kwargs: Any) -> Tensor:
    return _torch_sdpa(*args, **kwargs)


def _functorch_traced() -> bool:
    return _functorch_active()


def _count_traced(reason: str | None) -> None:
    _switch.count(reason, compiled=True)


_dynamo_taught = False


def _teach_dynamo() -> None:
    """Makes Dynamo read `_compiled_sdpa`, now or as soon as something imports it (which takes seconds)."""
    if "torch._dynamo" not in sys.modules:
        sys.meta_path.insert(0, _WhenDynamoIsImported())
    elif not _dynamo_taught:
        _substitute()
        torch.compiler.reset()  # what was compiled up to now has no guard


def _forget_dynamo_import() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenDynamoIsImported)]


def _substitute() -> None:
    global _dynamo_taught
    _dynamo_taught = True
    try:
        from torch._dynamo import trace_rules

        # torch's own entry would win; where there is none, nothing is lost.
        trace_rules.get_torch_obj_rule_map().pop(_torch_sdpa, None)
        torch.compiler.substitute_in_graph(_torch_sdpa, skip_signature_check=True)(_compiled_sdpa)
        torch.compiler.allow_in_graph(_torch_sdpa_in_graph)
        torch.compiler.assume_constant_result(_count_traced)
        torch.compiler.assume_constant_result(_functorch_traced)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        warnings.warn(
            f"override_sdpa() does not know the compiler of torch {torch.__version__} ({error}): "
            "what torch.compile makes keeps torch's kernels",
            stacklevel=2,
        )


class _WhenDynamoIsImported(importlib.abc.MetaPathFinder):
    """Stands in front of the import system until torch._dynamo is imported, and teaches it then."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_teach(module: ModuleType) -> None:
            execute(module)
            _substitute()

        spec.loader.exec_module = execute_and_teach  # type: ignore[method-assign]
        return spec
