"""What ``training.compile`` compiles: the blocks of a model and its loss.

Equal blocks are compiled once. What lies between them stays eager, which FSDP's gathers and the capture of a CUDA graph
need. The loss takes BF16 logits as they are: eager, float32 copies of 16k logits a token cost a small model as much as
its blocks do.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.survey import ConversionError, Survey


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's stack of blocks; empty where it has none, or two of one length."""
    try:
        return Survey(model).blocks()[1]
    except ConversionError:
        return []


def compile_blocks(model: nn.Module) -> None:
    """In place; a model without a stack of blocks is compiled as a whole."""
    for part in blocks_of(model) or [model]:
        part.compile()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32 (0-d); `logits` [batch, length, vocabulary], `targets` int64 alike."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@cache
def compiled_token_loss():
    return torch.compile(token_loss)


def next_token_loss(model: nn.Module, windows: Tensor, compiled: bool = False) -> Tensor:
    """Mean cross entropy of a causal model in nats, float32; `windows` int64 [batch, sequence_length + 1]."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return (compiled_token_loss() if compiled else token_loss)(logits, windows[:, 1:])
