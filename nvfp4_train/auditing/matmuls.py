"""Matrix products that this library does not own: attention, the output head, a user's ``F.linear`` or ``@``.

A dispatch mode sees every operator as it runs, forward and backward. ``linear``, ``matmul``, ``einsum`` and the like
have become ``mm``, ``addmm``, ``bmm`` or ``baddbmm`` by then; fused attention and convolutions are operators of their
own. This library's products are operators too (what happens inside them is not seen here, so nothing counts twice).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# which arguments are the two factors; both are the last two of the operator's first tensors
MATRIX = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2), aten.mv: (0, 1), aten.addmv: (1, 2),
    aten.dot: (0, 1), aten.addbmm: (1, 2), aten._scaled_mm: (0, 1), aten._int_mm: (0, 1),
    aten._addmm_activation: (1, 2),
}  # fmt: skip
GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward",
)  # fmt: skip
KINDS = ("fprop", "dgrad", "wgrad", "attention", "other")


class ForeignMatmuls(TorchDispatchMode):
    """Counts FLOPs of foreign products as ``flops[kind, module]``; kinds are those of ``KINDS``.

    A product one factor of which is a parameter (or made of parameters) is Fprop in the forward pass and Dgrad in the
    backward pass; a backward product whose result has the shape of such a parameter is Wgrad. A product of two
    activations is ``attention``.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.flops: Counter[tuple[str, str]] = Counter()
        self.unknown: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # address of a parameter's storage -> the parameter's name
        self._shapes: dict[tuple[int, ...], str] = {}  # of parameters that a forward product has read
        self._copies: dict[int, Any] = {}  # keeps casts of parameters alive, so that no address is used twice
        for name, parameter in model.named_parameters():
            self._names[_address(parameter)] = name
        self._inside: list[str] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Counts what runs inside; hooks tell in which module a forward product runs."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.callback(self._copies.clear)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in MATRIX:
            a, b = (args[i] for i in MATRIX[packet])
            out = func(*args, **kwargs)
            self._product(a, b, out)
            return out
        name = packet.__name__
        if name in GROUPED:
            out = func(*args, **kwargs)
            self._product(args[0], args[1], out)
            return out
        if name in ATTENTION:
            out = func(*args, **kwargs)
            self._attention(args, kwargs, 1.0)
            return out
        if name.endswith("_backward") and "attention" in name:
            out = func(*args, **kwargs)
            # scores once more, then the gradients of values, weights, queries and keys: five products for two
            self._attention(args[1:], kwargs, 2.5)
            return out
        if name in ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution"):
            out = func(*args, **kwargs)
            self._add("fprop", self._name(args[1]) or self._here(), _convolution(args[0], args[1], out))
            return out
        if name == "convolution_backward":
            out = func(*args, **kwargs)
            grad, x, weight, mask = args[0], args[1], args[2], args[-1]
            for wanted, kind in zip(mask, ("dgrad", "wgrad"), strict=False):
                if wanted:
                    self._add(kind, self._name(weight) or self._here(), _convolution(x, weight, grad))
            return out
        if func.namespace == "aten":
            decomposed = self._decomposed(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        if not self._backward and (parameter := self._derived_from(args)):
            for made in out if isinstance(out, tuple | list) else (out,):
                if isinstance(made, Tensor):
                    self._names.setdefault(_address(made), parameter)
                    self._copies[_address(made)] = made
        return out

    def _derived_from(self, args) -> str | None:
        """The parameter behind an operator's result, if all its tensors are parameters or made of them: casts, views,
        weights that are computed anew each time."""
        names = [self._name(arg) for arg in args if isinstance(arg, Tensor)]
        return names[0] if names and all(names) else None

    def _decomposed(self, func, args, kwargs):
        """Operators that are compositions of others by definition, taken apart so that their products are seen."""
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return
        flops = 2 * prod(out.shape) * a.shape[-1]
        if out.dim() == 2 and a.dim() == 2 and b.dim() == 2 and a.shape[-1] != b.shape[-2]:  # grouped along K
            flops = 2 * prod(a.shape) * b.shape[-1]
        parameter = self._name(a) or self._name(b)
        if not self._backward:
            if parameter:
                weight = a if self._name(a) else b
                for shape in (tuple(weight.shape), tuple(weight.shape[:-2] + weight.shape[:-3:-1])):
                    self._shapes.setdefault(shape, parameter)
            self._add("fprop" if parameter else "attention", parameter or self._here(), flops)
        elif parameter:
            self._add("dgrad", parameter, flops)
        elif tuple(out.shape) in self._shapes:
            self._add("wgrad", self._shapes[tuple(out.shape)], flops)
        else:
            self._add("attention", "", flops)

    def _attention(self, args, kwargs, passes: float) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][:3]
        if len(tensors) < 3 or any(t.dim() != 4 for t in tensors):
            self.unknown["attention of an unknown layout"] += 1
            return
        q, k, v = tensors
        flops = 2 * prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
        self._add("attention", "" if self._backward else self._here(), round(passes * flops))

    def _add(self, kind: str, where: str, flops: int) -> None:
        self.flops[kind, where] += flops

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(_address(tensor))

    @property
    def _backward(self) -> bool:
        """Whether autograd runs; a module's forward inside of it is a checkpoint's recomputation."""
        return not self._inside and torch._C._current_graph_task_id() != -1

    def _here(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _enter(self, name: str):
        def hook(_module, _inputs):
            self._inside.append(name)

        return hook

    def _leave(self, _module, _inputs, _output):
        if self._inside:
            self._inside.pop()


def _convolution(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Of a plain convolution; a transposed one has its many positions at its input."""
    places = max(prod(x.shape[2:]), prod(out.shape[2:])) if x.shape[1] != weight.shape[1] else prod(out.shape[2:])
    return 2 * x.shape[0] * places * prod(weight.shape)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without a storage (fake, sparse): no parameter of ours
        return 0
