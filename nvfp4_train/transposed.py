"""transformers' Conv1D (GPT-2 and its kin): a linear layer that keeps its weight as ``[in, out]``."""

import torch
from torch import Tensor, nn

from nvfp4_train import layer_state
from nvfp4_train.quantization import INPUT_TYPES, draw_seed, layer_input
from nvfp4_train.recipe import Recipe
from nvfp4_train.swapping import Quantized


class QuantizedConv1D(Quantized):
    """Conv1D with quantized Fprop, Dgrad and Wgrad; parameters and state_dict are those of Conv1D.

    The weight operand of Fprop is the transpose ``[out, in]``: blocks lie as they would in an ``nn.Linear`` of the
    same function, and every recipe gives that layer's numbers. Shapes: input ``[..., in]``, output ``[..., out]``.
    ValueError for input of a wrong size or dtype.
    """

    products = ("weight",)
    kind = "a Conv1D"

    @property
    def in_features(self) -> int:
        return self.weight.shape[0]

    def _set_up(self, recipe: Recipe, label: str, backend: str | None) -> None:
        super()._set_up(recipe, label, backend)
        layer_state.prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_sharded(x)
        features, out_features = self.in_features, self.weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != features:
            raise ValueError(f"{self.label}: input has shape {tuple(x.shape)}, expected {features} features")
        x = layer_input(x, self.label)
        out_dtype = x.dtype
        where = self.sites["weight"].shape[0]
        seed = draw_seed(x, where) if self.plan.stochastic else None
        main_grad = getattr(self.weight, "main_grad", None)
        y = self._product(
            x.reshape(x.shape[:-1].numel(), features), self.weight.T, None if main_grad is None else main_grad.T,
            seed, where, torch.float32,
        )  # fmt: skip
        return (y + self.bias.float()).to(out_dtype).reshape(*x.shape[:-1], out_features)

    def __repr__(self) -> str:
        """Conv1D writes its own, from attributes that an error message must not depend on."""
        return f"{type(self).__name__}({self.extra_repr()})"


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D (told by its name: importing transformers takes seconds)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def why_not_conv1d(module: nn.Module) -> str | None:
    """Why a Conv1D must stay as it is, or None."""
    if "forward" in module.__dict__ or module.__dict__.get("_compiled_call_impl") is not None:
        return "its forward was replaced or compiled: convert first, then compile"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or bias is None:
        return "its weight or bias is computed anew each time (parametrized)"
    if weight.dtype not in INPUT_TYPES:
        return f"its weight is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
    return None
