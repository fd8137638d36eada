"""Modules and models under compile, export, autocast, vmap and DistributedDataParallel."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from attn_ext.models import CausalLM, Seq2SeqTransformer
from attn_ext.nn import (
    MultiHeadAttention,
    RotaryEmbedding,
    TransformerDecoder,
    TransformerEncoder,
)


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]  # of B sequences of L tokens
    options: Callable[[int], dict[str, Any]] = lambda batch: {}

    def module(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()


def lengths(batch: int) -> Tensor:
    return torch.arange(batch) + 2


def features(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 16)


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, 20, (batch, length))


CASES = {
    "attention": Case(
        lambda: MultiHeadAttention(16, 4, 0.0),
        lambda b, n: (features(b, n),) * 3,
        lambda b: {"key_lengths": lengths(b)},
    ),
    "encoder": Case(
        lambda: TransformerEncoder(2, 16, 4, 32, 0.0, activation="gelu"),
        lambda b, n: (features(b, n),),
        lambda b: {"key_lengths": lengths(b)},
    ),
    "rotary encoder": Case(
        lambda: TransformerEncoder(
            2, 16, 4, 32, 0.0, norm_first=True, norm="rms", activation="swiglu", bias=False, num_kv_heads=2,
            rotary=RotaryEmbedding(4),
        ),
        lambda b, n: (features(b, n),),
        lambda b: {"causal": True},
    ),
    "decoder": Case(
        lambda: TransformerDecoder(2, 16, 4, 32, 0.0),
        lambda b, n: (features(b, n), features(b, 7)),
        lambda b: {"encoder_lengths": lengths(b)},
    ),
    "causal lm": Case(lambda: CausalLM(20, 16, 4, 32, 2, num_kv_heads=1), lambda b, n: (ids(b, n),)),
    "seq2seq": Case(
        lambda: Seq2SeqTransformer(20, 20, 16, 4, 32, 1, 1, dropout=0.0),
        lambda b, n: (ids(b, 7), ids(b, n)),
    ),
}  # fmt: skip

each_case = pytest.mark.parametrize("name", CASES)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@each_case
def test_compiled_equals_eager_without_graph_breaks_in_training_and_evaluation(name: str) -> None:
    case = CASES[name]
    module = case.module()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    inputs, options = case.inputs(3, 6), case.options(3)
    first(module(*inputs, **options)).square().sum().backward()
    first(compiled(*inputs, **options)).square().sum().backward()
    for (parameter, ours), theirs in zip(module.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-5, msg=parameter)
    module.eval(), compiled.eval()
    with torch.no_grad():
        expected = first(module(*inputs, **options))
        torch.testing.assert_close(first(compiled(*inputs, **options)), expected, rtol=1e-5, atol=1e-5)


@each_case
def test_exported_equals_eager_also_for_other_batches(name: str) -> None:
    case = CASES[name]
    module = case.module().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    inputs, options = case.inputs(3, 6), case.options(3)
    dynamic = (
        tuple({0: batch} for _ in inputs),
        {key: {0: batch} if isinstance(value, Tensor) else None for key, value in options.items()},
    )
    if name == "attention":
        dynamic = ({0: batch}, {0: batch}, {0: batch}), dynamic[1]
    by_name = dict(zip(_parameter_names(module), dynamic[0], strict=False)) | dynamic[1]
    exported = torch.export.export(module, inputs, options, dynamic_shapes=by_name).module()
    for size in (3, 5):
        inputs, options = case.inputs(size, 6), case.options(size)
        with torch.no_grad():
            expected = first(module(*inputs, **options))
        torch.testing.assert_close(first(exported(*inputs, **options)), expected, rtol=1e-5, atol=1e-5)


def _parameter_names(module: nn.Module) -> list[str]:
    code = module.forward.__func__.__code__  # type: ignore[attr-defined]
    return list(code.co_varnames[1 : code.co_argcount])


@each_case
def test_autocast_stays_close_to_fp32_and_trains(name: str) -> None:
    case = CASES[name]
    module = case.module()
    inputs, options = case.inputs(3, 6), case.options(3)
    expected = first(module(*inputs, **options)).detach()
    with torch.autocast("cpu", torch.bfloat16):
        output = first(module(*inputs, **options))
    assert (output.float() - expected).abs().max() < 0.1 * expected.abs().max()
    output.float().square().mean().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", ["attention", "rotary encoder", "decoder"])
def test_vmap_gives_the_gradient_of_every_sample_on_its_own(name: str) -> None:
    case = CASES[name]
    module = case.module()
    parameters = {key: value.detach() for key, value in module.named_parameters()}
    inputs = case.inputs(3, 6)

    def loss(parameters: dict[str, Tensor], *one: Tensor) -> Tensor:
        return first(functional_call(module, parameters, tuple(x[None] for x in one))).square().sum()

    together = vmap(grad(loss), in_dims=(None, *(0 for _ in inputs)))(parameters, *inputs)
    for sample in range(3):
        alone = grad(loss)(parameters, *(x[sample] for x in inputs))
        for key, value in alone.items():
            torch.testing.assert_close(together[key][sample], value, rtol=1e-4, atol=1e-5, msg=key)


@each_case
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    case = CASES[name]
    module = case.module().eval()
    inputs, options = case.inputs(3, 6), case.options(3)
    expected = first(module(*inputs, **options))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(first(twin(*inputs, **options)), expected)


def _train_on_one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    try:
        module = nn.parallel.DistributedDataParallel(CASES["causal lm"].module())
        torch.manual_seed(11)
        tokens = ids(4, 6)
        module(tokens[2 * rank : 2 * rank + 2]).square().mean().backward()
        grads = {name: parameter.grad for name, parameter in module.module.named_parameters()}
        torch.save(grads, os.path.join(folder, f"{rank}.pt"))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_distributed_data_parallel_averages_the_gradients_of_both_halves() -> None:
    module = CASES["causal lm"].module()
    torch.manual_seed(11)
    module(ids(4, 6)).square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train_on_one_of_two, (folder,), nprocs=2)
        for rank in range(2):
            grads = torch.load(os.path.join(folder, f"{rank}.pt"))
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
