"""Registers this library's operators: opaque to torch.compile, run as Python, which is where the ledger counts.

``torch.library.custom_op`` does the same with more checks at each call: 20 us a call on a CPU against 3 us this way,
and a layer makes nine calls a step.
"""

from collections.abc import Callable, Sequence

import torch

_LIBRARY = torch.library.Library("nvfp4_train", "DEF")


def operator(schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable], Callable]:
    """Decorates the function that ``schema`` (``name(Tensor x, ...) -> Tensor``) describes; returns the operator."""

    def register(function: Callable) -> Callable:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.nvfp4_train, name).default

    return register


def shapes_of(op: Callable) -> Callable[[Callable], Callable]:
    """Decorates the function that gives an operator's outputs without computing them (for torch.compile)."""

    def register(function: Callable) -> Callable:
        torch.library.register_fake(op.name(), function, lib=_LIBRARY)
        return function

    return register
