"""Evidence: what one training step handed to each GEMM, gathered while it ran.

A ``Tape`` is a ledger observer: it sees the tensors inside the ops. Hooks on the layers (eager only: a compiled graph
does not run them) add what each operand *should* have come from: the layer's input, its weight, the gradient that
arrived at its output, and the gradients that left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nvfp4_kernels.reference.decode import decode
from nvfp4_kernels.scheme import Scheme
from nvfp4_train.ledger import Product, Quantization
from nvfp4_train.quantization import layer_input

GEMMS = ("fprop", "dgrad", "wgrad")
# The two operands of each GEMM: the tensor it comes from, and whether the operand is that tensor's transpose.
OPERANDS = {
    "fprop": (("fprop.input", "input", False), ("fprop.weight", "weight", False)),
    "dgrad": (("dgrad.grad_output", "grad_output", False), ("dgrad.weight", "weight", True)),
    "wgrad": (("wgrad.grad_output", "grad_output", True), ("wgrad.input", "input", True)),
}


@dataclass(eq=False)
class Call:
    """One call of one layer, forward and backward. Sources are two-dimensional: [tokens, features], [N, K].

    ``products``: the main product of each GEMM; ``apart``: those of channels that a recipe sets apart.
    """

    layer: str
    number: int
    sources: dict[str, Tensor] = field(default_factory=dict)  # input, weight, grad_output
    quantizations: dict[str, Quantization] = field(default_factory=dict)
    products: dict[str, Product] = field(default_factory=dict)
    apart: dict[str, Product] = field(default_factory=dict)
    output: Tensor | None = None  # [tokens, N] as it left the layer
    input_gradient: Tensor | None = None  # [tokens, K] as it left the layer
    needs_gradient: tuple[bool, bool] | None = None  # of the input and of the weight; None where no hook ran
    channels: Tensor | None = None  # those that a layer has chosen to set apart for good

    @property
    def backward_ran(self) -> bool:
        return "dgrad" in self.products or "wgrad" in self.products or "grad_output" in self.sources

    @property
    def seed(self) -> Tensor | None:
        return next((event.seed for event in self.quantizations.values() if event.seed is not None), None)

    def source(self, key: str) -> Tensor | None:
        """What the operand should come from: seen by a hook, else what the quantizer was handed."""
        if key in self.sources:
            return self.sources[key]
        for name, event in self.quantizations.items():
            if name.endswith(f".{key}"):
                return event.source
        return None

    def add(self, product: Product) -> None:
        """Channels apart are told by their operands: the main one says that it is split."""
        main = self.products.get(product.gemm)
        if main is not None and _split(main) >= _split(product):
            self.apart[product.gemm] = product
        else:
            if main is not None:
                self.apart[product.gemm] = main
            self.products[product.gemm] = product


def _split(product: Product) -> bool:
    return "split=channels" in product.a_scheme or "split=channels" in product.b_scheme


class Tape:
    """Everything that ran, sorted into calls; what ran in no GEMM of a layer stands in ``quantizations`` alone."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.quantizations: list[Quantization] = []
        self._forming: dict[str, Call] = {}  # the call whose forward runs, or ran last
        self._backward: dict[str, Call] = {}  # the call whose gradient arrived last, where hooks say so

    def quantized(self, event: Quantization) -> None:
        self.quantizations.append(event)
        forward = event.operand in ("fprop.input", "fprop.weight") or event.operand == "wgrad.input"
        # an input for Wgrad that is made from what Fprop quantized is made in the backward pass
        if forward and not (event.operand == "wgrad.input" and "requantized" in event.scheme):
            call = self._forming_call(event.layer, event.operand == "fprop.input")
            call.quantizations[event.operand] = event
        elif (call := self._backward_call(event.layer, event.operand.split(".")[0])) is not None:
            call.quantizations[event.operand] = event

    def multiplied(self, event: Product) -> None:
        if event.gemm == "fprop":
            self._forming_call(event.layer, not _split(event)).add(event)
        elif event.gemm in GEMMS and (call := self._backward_call(event.layer, event.gemm)) is not None:
            # autograd may make the result a parameter's .grad as it is, and add the next microbatch's to it in place
            call.add(event._replace(out=None if event.out is None else event.out.clone()))

    def link(self) -> None:
        """Gives each call the quantizations its operands came from, where the compiler merged equal ones of several
        layers and they carry no layer's name: told by their bits."""
        for call in self.calls:
            for gemm, product in call.products.items():
                for (name, _, _), seen, text in zip(
                    OPERANDS[gemm], (product.a, product.b), (product.a_scheme, product.b_scheme), strict=True
                ):
                    if name not in call.quantizations:
                        found = [e for e in self.quantizations if e.operand == name and e.scheme == text]
                        event = next((e for e in found if not e.layer and _made(e, seen)), None)
                        if event is not None:
                            call.quantizations[name] = event

    def of_layer(self, layer: str) -> list[Call]:
        return [call for call in self.calls if call.layer == layer]

    def _count(self, layer: str) -> int:
        return sum(call.layer == layer for call in self.calls)

    def _forming_call(self, layer: str, may_begin: bool) -> Call:
        """The call that runs forward now; without hooks a new one begins with the first event after a product."""
        call = self._forming.get(layer)
        if call is None or (may_begin and call.needs_gradient is None and "fprop" in call.products):
            call = self._forming[layer] = Call(layer, self._count(layer))
            self.calls.append(call)
        return call

    def _backward_call(self, layer: str, gemm: str) -> Call | None:
        if layer in self._backward:
            return self._backward[layer]
        # without hooks: the last forward that has had no backward of this GEMM yet
        waiting = [call for call in self.of_layer(layer) if gemm not in call.products]
        return waiting[-1] if waiting else (self.of_layer(layer) or [None])[-1]

    @contextmanager
    def hooked(self, layers: dict[str, nn.Module]) -> Iterator[None]:
        """Hooks on the layers (name -> module) for the time of the block."""
        with ExitStack() as stack:
            for name, module in layers.items():
                before = module.register_forward_pre_hook(self._before(name, module))
                after = module.register_forward_hook(self._after(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _before(self, name: str, module: nn.Module):
        def hook(_module, inputs):
            x, *others = inputs
            x = layer_input(x, name)  # under autocast, what is quantized is the cast input
            call = Call(name, self._count(name))
            call.sources = {"input": _matrix(x).detach(), "weight": module.weight.detach()}
            call.channels = module._buffers.get("quantizer_channels")
            call.needs_gradient = (
                (x.requires_grad, module.weight.requires_grad) if torch.is_grad_enabled() else (False, False)
            )
            self.calls.append(call)
            self._forming[name] = call
            if x.requires_grad and torch.is_grad_enabled():
                x = x.view_as(x)  # a node of its own: its gradient is this call's alone, whoever else reads x

                def left(gradient: Tensor) -> None:
                    call.input_gradient = _matrix(gradient).detach()

                x.register_hook(left)
            return (x, *others)

        return hook

    def _after(self, name: str):
        def hook(_module, _inputs, output):
            call = self._forming.pop(name)
            call.output = _matrix(output).detach()
            if output.requires_grad:

                def arrived(gradient: Tensor) -> None:
                    call.sources["grad_output"] = _matrix(gradient).detach()
                    self._backward[name] = call

                output.register_hook(arrived)

        return hook


def _made(event: Quantization, seen: Tensor) -> bool:
    made, columns = event.made, seen.shape[1]
    if made.operand is None:
        if made.codes.shape[0] != seen.shape[0]:
            return False
        scheme = Scheme.parse(event.scheme)
        return torch.equal(decode(made.codes, made.scales, scheme, columns, made.outer), seen)
    return made.operand.shape[0] == seen.shape[0] and torch.equal(made.operand[:, :columns], seen)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
