"""What carries tensors to the device and back (device_support.py), and what sees to it that nothing else is called."""

from __future__ import annotations

import pytest
import torch
from cuda_support import attention, attention_weights
from device_support import DEVICE, carried
from op_support import LAYOUTS, Shape, make
from torch import Tensor

import attn_ext


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_offsets_and_values_are_kept(layout: str) -> None:
    host = make((2, 3, 4, 5), layout=layout)

    def look(there: Tensor) -> None:
        assert there.device.type == DEVICE and there.data_ptr() != host.data_ptr()
        assert there.stride() == host.stride() and there.storage_offset() == host.storage_offset()
        assert torch.equal(there.cpu(), host)

    carried(look)(host)


def test_what_tensors_share_they_share_on_the_device() -> None:
    host = torch.arange(6.0)

    def look(first: Tensor, again: Tensor, part: Tensor) -> None:
        assert first is again and first.data_ptr() + 2 * 4 == part.data_ptr()

    carried(look)(host, host, host[2:])


def test_what_is_written_there_is_written_here() -> None:
    host = torch.zeros(2, 6)
    carried(lambda caches: caches["k"].fill_(7.0))({"k": host[:, ::2]})
    assert torch.equal(host, torch.tensor([7.0, 0.0]).repeat(3).expand(2, 6))


def test_gradients_come_back_to_the_hosts_tensors() -> None:
    host = make((2, 3), seed=1).requires_grad_(True)
    first, pair = carried(lambda x: (x * 2, [x * x]))(host)
    assert first.device.type == "cpu"
    (grad,) = torch.autograd.grad(first.sum() + pair[0].sum(), host, create_graph=True)
    torch.testing.assert_close(grad, 2 + 2 * host)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), host)[0], torch.full((2, 3), 2.0))


def test_a_call_with_the_hosts_tensors_is_an_error() -> None:
    q, k, v = Shape(1, 2, 1, 3, 5, 4).qkv()
    for tensors in ((q, k, v), (q.clone().requires_grad_(True), k, v)):
        with pytest.raises(AssertionError, match="not carried"):
            attn_ext.attention(*tensors)
    with pytest.raises(AssertionError, match="not carried"):
        torch.ops.attn_ext.attention_inference(q, k, v, 0, None)
    with pytest.raises(AssertionError, match="not carried"):
        attn_ext.attention_weights(q, k)
    assert attention_weights(q, k).shape == (1, 2, 3, 5)
    out = attention(q.requires_grad_(True), k, v)
    torch.autograd.grad(out.sum(), q)  # a backward pass belongs to the call that it is of
