"""The functions that meet dual numbers, kept from `torch.compile`, which loses their tangents (see `dual_numbers`)."""

from __future__ import annotations

import torch

from attn_ext import _arguments, ops

_REASON = "compiled code loses the tangents of dual tensors"

cast = torch.compiler.disable(_arguments._cast, reason=_REASON)
have_tangent = torch.compiler.disable(_arguments._have_tangent, reason=_REASON)
chosen_weights = torch.compiler.disable(ops._chosen_weights, reason=_REASON)
unfused = torch.compiler.disable(ops._unfused, reason=_REASON)
unfused_weights = torch.compiler.disable(ops._unfused_weights, reason=_REASON)
