"""The rivals: torch's scaled_dot_product_attention, ONNX Runtime, OpenVINO, and the plain formula where torch has none.

Each is given its best road: masks and biases are built beforehand, in the form and layout the rival likes, and each
gets as many threads as we do. A rival that cannot do a row says why.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import Case, Inputs, alibi_bias, combined_mask
from bench.common import Runner


class CannotRun(Exception):
    """Why a rival has no figure in a row."""


# --- torch --------------------------------------------------------------------------------------------------------


def torch_runner(case: Case, inputs: Inputs) -> Runner:
    """torch's best road for a row: SDPA, with a ready-made mask where the options need one; the formula otherwise."""
    forward, how = torch_forward(case, inputs)
    return runner_of("torch", case, inputs, forward, how)


def torch_forward(case: Case, inputs: Inputs) -> tuple[Callable[[], Tensor], str]:
    """A call that gives the row's output with torch alone, and the name of the road it takes."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.softcap or case.sinks:  # no mask can express these
        return functools.partial(eager_attention, q, k, v, **eager_options(case, inputs)), "formula"
    square_causal = case.causal and (case.Lq == case.Lk or case.causal == "top_left")
    only_causal = not (case.window or case.key_lengths or case.mask or case.bias or case.alibi)
    is_causal = bool(square_causal and only_causal)
    mask = None if is_causal else as_one_mask(case, inputs)
    call = functools.partial(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=case.dropout_p,
        is_causal=is_causal,
        enable_gqa=case.Hq != case.Hkv,
    )
    return call, "SDPA" if mask is None else "SDPA with mask"


# torch's own kernels behind SDPA, of which it chooses one. On a GPU each has a figure of its own.
BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def through_backend(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`call`, with SDPA kept to one of BACKENDS.

    To say so costs the host some microseconds, which the figures of the smallest rows may hold.
    """

    def kept(*args: Any) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return call(*args)

    return kept


def answer_of(call: Callable[[], Any]) -> Any:
    """What a call through a backend gives; CannotRun with torch's reasons where the backend refuses."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return call()
        except RuntimeError as error:
            reasons = [str(warning.message).partition(" (Triggered")[0].strip() for warning in said]
            reasons = [reason for reason in reasons if "not used because" not in reason]
            raise CannotRun(f"refused: {'; '.join(reasons) or _first_line(error)}") from error


def backend_runner(name: str, case: Case, inputs: Inputs) -> tuple[Runner, Tensor]:
    """The row through one of BACKENDS, and its output; CannotRun says why not."""
    forward, how = torch_forward(case, inputs)
    if how == "formula":
        raise CannotRun("SDPA lacks the option")
    forward = through_backend(name, forward)
    with torch.set_grad_enabled(case.direction != "forward"):
        out = answer_of(forward).detach()
        runner = answer_of(lambda: runner_of(name, case, inputs, forward, how))
        answer_of(runner.call)
    return runner, out


def as_one_mask(case: Case, inputs: Inputs) -> Tensor | None:
    """All that hides keys or is added to scores, in one tensor: bool (True = attend), float, or None."""
    added, seen = added_and_visible(case, inputs)
    if added is None:
        return seen
    return added if seen is None else added.masked_fill(~seen, float("-inf"))


def added_and_visible(case: Case, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """The bias with ALiBi in it, and the bool mask with everything in it."""
    added = inputs.options.get("bias")
    if case.alibi:
        slopes = alibi_bias(case, inputs.options["alibi_slopes"])
        added = slopes if added is None else added + slopes
    mask, key_lengths = (inputs.options.get(name) for name in ("mask", "key_lengths"))
    return added, combined_mask(case, mask, key_lengths, inputs.q.device)


def eager_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The row's options as `eager_attention` takes them."""
    added, seen = added_and_visible(case, inputs)
    return {"added": added, "seen": seen, "softcap": case.softcap, "sinks": inputs.options.get("sinks")}


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    added: Tensor | None = None,
    seen: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula in plain PyTorch, in the dtype of q, with an Lq × Lk matrix: what one writes by hand.

    Args:
        q: (B, Hq, Lq, D); k: (B, Hkv, Lk, D); v: (B, Hkv, Lk, Dv).
        added: a bias that broadcasts to (B, Hq, Lq, Lk).
        seen: bool, True = attend, likewise.
        softcap, sinks: as in `attn_ext.attention`.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, Hq, Lq, Lk)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1) @ v
    logits = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, logits), dim=-1).softmax(dim=-1)[..., :-1] @ v


def runner_of(name: str, case: Case, inputs: Inputs, forward: Callable[[], Tensor], how: str = "") -> Runner:
    """Turns a forward call into what the row's pass times. Backward rows keep their graph and walk it again."""
    if case.direction == "forward":
        return Runner(name, forward, grad=False, how=how)
    leaves, grad_out = inputs.leaves, inputs.grad_out
    if case.direction == "forward+backward":
        return Runner(name, lambda: torch.autograd.grad(forward(), leaves, grad_out), grad=True, how=how)
    with torch.enable_grad():
        out = forward()
    return Runner(
        name, lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), grad=True, how=how
    )


# --- engines that are not torch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineRunner:
    """A timed call, and how to get at its last output as a torch tensor (B, Hq, Lq, Dv)."""

    runner: Runner
    output: Callable[[], Tensor]


def engine_runner(name: str, case: Case, inputs: Inputs, threads: int) -> EngineRunner:
    """The row in another engine; CannotRun says why not."""
    if inputs.q.device.type != "cpu":
        raise CannotRun("compared on the CPU only")
    if case.direction != "forward":
        raise CannotRun("inference only")
    if case.Hq != case.Hkv:
        raise CannotRun("its operator has no grouped heads")
    if case.softcap or case.sinks or case.dropout_p:
        raise CannotRun("its operator lacks the option")
    return ENGINES[name](case, inputs, threads)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotRun(f"{name.partition('.')[0]} is not installed") from error


def _onnxruntime(case: Case, inputs: Inputs, threads: int) -> EngineRunner:
    """com.microsoft's MultiHeadAttention: inputs (B, L, H·D), causal by attribute, everything else as a bias."""
    if case.dtype != "fp32":
        raise CannotRun("its CPU operator takes fp32 only")
    if not (case.causal is False or (case.causal is True and case.Lq == case.Lk)):
        raise CannotRun("its causal corner is another one")
    if case.window or case.mask or case.key_lengths or case.alibi:
        raise CannotRun("no mask but causal is given to it here")
    ort, onnx = _module("onnxruntime"), _module("onnx")
    helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT

    def info(name: str, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, FLOAT, shape)

    tensors = {
        name: t.transpose(1, 2).reshape(case.B, t.shape[2], -1).contiguous()
        for name, t in (("query", inputs.q), ("key", inputs.k), ("value", inputs.v))
    }
    names = ["query", "key", "value"]
    if case.bias:
        tensors["attention_bias"] = inputs.options["bias"].detach().contiguous()
        names += ["", "", "attention_bias"]
    node = helper.make_node(
        "MultiHeadAttention",
        names,
        ["out"],
        domain="com.microsoft",
        num_heads=case.Hq,
        unidirectional=int(bool(case.causal)),
    )
    result = info("out", (case.B, case.Lq, case.Hq * case.Dv))
    graph = helper.make_graph(
        [node], "attention", [info(n, tuple(t.shape)) for n, t in tensors.items()], [result]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 3
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the runtime's own exception classes differ from version to version
        raise CannotRun(f"refused: {_first_line(error)}") from error
    binding = session.io_binding()
    held = {name: ort.OrtValue.ortvalue_from_numpy(t.numpy()) for name, t in tensors.items()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out", "cpu")

    def output() -> Tensor:
        flat = torch.from_numpy(binding.get_outputs()[0].numpy())
        return flat.view(case.B, case.Lq, case.Hq, case.Dv).transpose(1, 2)

    call = functools.partial(session.run_with_iobinding, binding)
    return EngineRunner(Runner("onnxruntime", call, how="MultiHeadAttention", held=held), output)


def _openvino(case: Case, inputs: Inputs, threads: int) -> EngineRunner:
    """ScaledDotProductAttention of its operator set: inputs (B, H, L, D), one mask, causal by attribute."""
    if case.dtype not in ("fp32", "bf16"):
        raise CannotRun("compared in fp32 and bf16 only")
    ov = _module("openvino")
    opset = _module("openvino.opset13")
    kind = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16}[case.dtype]
    only_causal = case.causal is True and not (
        case.window or case.mask or case.key_lengths or case.alibi or case.bias
    )
    mask = None if only_causal else as_one_mask(case, inputs)

    tensors = [t.detach().contiguous() for t in (inputs.q, inputs.k, inputs.v)]
    parameters = [opset.parameter(list(t.shape), kind) for t in tensors]
    if mask is not None:
        seen = mask.dtype == torch.bool
        full = mask.detach()[(None,) * (4 - mask.dim())].contiguous()
        tensors.append(full if seen else full.to(inputs.q.dtype))
        parameters.append(opset.parameter(list(full.shape), ov.Type.boolean if seen else kind))
    node = opset.scaled_dot_product_attention(*parameters, causal=only_causal)
    precision = "f32" if case.dtype == "fp32" else "bf16"
    try:
        compiled = ov.Core().compile_model(
            ov.Model([node], parameters, "attention"),
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1},
        )
    except RuntimeError as error:
        raise CannotRun(f"refused: {_first_line(error)}") from error
    request = compiled.create_infer_request()
    arrays = [(t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy() for t in tensors]
    for index, (t, array) in enumerate(zip(tensors, arrays, strict=True)):
        if t.dtype == torch.bfloat16:
            shared = ov.Tensor(array, list(t.shape), ov.Type.bf16)
        else:
            shared = ov.Tensor(array, shared_memory=True)
        request.set_input_tensor(index, shared)

    def output() -> Tensor:
        tensor = request.get_output_tensor(0)
        if tensor.element_type == ov.Type.bf16:
            return torch.frombuffer(bytearray(tensor.data.tobytes()), dtype=torch.bfloat16).view(
                list(tensor.shape)
            )
        return torch.from_numpy(tensor.data.copy())

    runner = Runner("openvino", request.infer, how="ScaledDotProductAttention", held=(tensors, arrays))
    return EngineRunner(runner, output)


ENGINES: dict[str, Callable[[Case, Inputs, int], EngineRunner]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
