"""Transformers' ``sdpa`` attention, with the same mask while a CUDA graph is captured as in the calls before.

Where the causal order says all, sdpa needs no mask. transformers finds that out by looking at tensors, which a capture
forbids, so there it writes the mask out: that takes the fast attention kernels away and, in the middle of the capture,
has compiled blocks compiled anew. What the same call needed outside of the capture is known: it is kept here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_for_graphs"
_needs_none: dict[tuple, bool] = {}


def use_for_graphs(model: nn.Module) -> None:
    """Readies a ``model`` with sdpa attention for capture; other attention stays as it is."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(NAME, _mask)
        model.set_attn_implementation(NAME)


def _mask(**options) -> Tensor | None:
    known = ("q_length", "kv_length", "local_size")
    key = id(options.get("config")), *(options.get(name) for name in known), options.get("attention_mask") is None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None if _needs_none.get(key) else sdpa_mask(**options)
    mask = sdpa_mask(**options)
    _needs_none[key] = mask is None
    return mask
