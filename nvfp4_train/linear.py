"""One linear layer whose three GEMMs run on quantized operands. The whole idea is on this page.

    Fprop  y  = x  @ w.T     x_q  1x16 blocks along K    w_q  16x16 blocks
    Dgrad  dx = dy @ w       dy_q 1x16 along N, SR       w_q, transposed: a 16x16 block is its own transpose
    Wgrad  dw = dy.T @ x     both 1x16 along the tokens, after the same Hadamard transform; dy.T with SR

(the recipe ``nvidia_nvfp4``; the operands' formats are data, see recipe.py). Every GEMM is ``matmul(a, b) = a @ b.T``
of two operands quantized along their reduction dimension. ``quantize_both`` makes the row form of a tensor (for Fprop
or Dgrad) and its column form (for Wgrad) from one read. Gradients pass straight through the rounding.

What forward keeps for backward is packed: about 0.57 bytes for an element of x and of w, never a BF16 copy.
"""

import torch
from torch import Tensor, nn

from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.backend import Backend, choose
from nvfp4_train.gemm import matmul
from nvfp4_train.quantization import BF16, INPUT_TYPES, QuantizedTensor, draw_seed, quantize, quantize_both
from nvfp4_train.recipe import LinearPlan, Recipe, load_recipe

# Second word of the Philox key. Both forms of one tensor draw from one stream.
STREAM = {"input": 0, "weight": 1, "grad_output": 2}


class LinearFunction(torch.autograd.Function):
    """``y [M, N] = x [M, K] @ w [N, K].T`` with the operands of ``plan``."""

    @staticmethod
    def forward(ctx, x, weight, main_grad, seed, where, plan: LinearPlan, backend: Backend, out_dtype, needs):
        needs_dx, needs_dw = needs
        shared_weight = needs_dx and transposes_exactly(plan)
        options = dict(seed=seed, backend=backend.quantize, where=where)

        x_q, xt_q = quantize_both(
            x, plan.fprop_input, plan.wgrad_input if needs_dw else None, stream=STREAM["input"],
            rows_form="decoded", columns_form="packed", rows_name="fprop.input", columns_name="wgrad.input", **options,
        )  # fmt: skip
        w_q = quantize(
            weight, plan.fprop_weight, stream=STREAM["weight"],
            form="both" if shared_weight else "decoded", name="fprop.weight", **options,
        )  # fmt: skip
        y = matmul(x_q, w_q, out_dtype, backend=backend.matmul, where=where, gemm="fprop")

        kept_weight = w_q.packed_only() if shared_weight else (weight if needs_dx else None)
        _save(ctx, xt_q, kept_weight, seed, main_grad)
        ctx.where, ctx.plan, ctx.backend, ctx.needs = where, plan, backend, needs
        ctx.dtypes = (x.dtype, weight.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        xt_q, kept_weight, seed, main_grad = _restore(ctx)
        plan, backend, where = ctx.plan, ctx.backend, ctx.where
        needs_dx, needs_dw = ctx.needs
        x_dtype, w_dtype = ctx.dtypes
        options = dict(seed=seed, backend=backend.quantize, where=where)

        dy_q, dyt_q = quantize_both(
            dy, plan.dgrad_grad_output if needs_dx else None, plan.wgrad_grad_output if needs_dw else None,
            stream=STREAM["grad_output"], rows_form="decoded", columns_form="decoded",
            rows_name="dgrad.grad_output", columns_name="wgrad.grad_output", **options,
        )  # fmt: skip
        dx = dw = None
        if needs_dx:
            if isinstance(kept_weight, QuantizedTensor):
                wt_q = kept_weight.T
            else:
                wt_q = quantize(
                    kept_weight, plan.dgrad_weight, transpose=True, stream=STREAM["weight"],
                    form="decoded", name="dgrad.weight", **options,
                )  # fmt: skip
            dx = matmul(dy_q, wt_q, x_dtype, backend=backend.matmul, where=where, gemm="dgrad")
        if needs_dw:
            product = dict(backend=backend.matmul, where=where, gemm="wgrad")
            if main_grad is not None:
                matmul(dyt_q, xt_q, torch.float32, accumulate_into=main_grad, **product)
            else:
                dw = matmul(dyt_q, xt_q, w_dtype, **product)
        return dx, dw, None, None, None, None, None, None, None


def transposes_exactly(plan: LinearPlan) -> bool:
    """Whether Dgrad can read Fprop's quantized weight the other way round, bit for bit."""
    if plan.fprop_weight != plan.dgrad_weight or plan.fprop_weight == BF16:
        return False
    scheme = Scheme.parse(plan.fprop_weight)
    return scheme.block[0] == scheme.block[1] and not scheme.hadamard


def _save(ctx, xt_q, kept_weight, seed, main_grad) -> None:
    """Tensors go through ``save_for_backward`` (hooks and checkpointing see them there), the rest stays plain."""
    ctx.kept = []
    tensors = []
    for item in (xt_q, kept_weight):
        parts = tuple(item) if isinstance(item, QuantizedTensor) else (item,)
        ctx.kept.append([None if isinstance(part, Tensor) else part for part in parts])
        tensors += [part if isinstance(part, Tensor) else None for part in parts]
    ctx.save_for_backward(*tensors, seed)
    ctx.main_grad = main_grad  # written to in backward, so autograd must not track its version


def _restore(ctx):
    *tensors, seed = ctx.saved_tensors
    items = []
    for plain in ctx.kept:
        parts = [value if saved is None else saved for value, saved in zip(plain, tensors, strict=False)]
        tensors = tensors[len(plain):]
        items.append(QuantizedTensor(*parts) if len(parts) > 1 else parts[0])
    xt_q, kept_weight = items
    return xt_q, kept_weight, seed, ctx.main_grad


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` with quantized Fprop, Dgrad and Wgrad; parameters and state_dict are those of ``nn.Linear``.

    The weight is quantized from the parameter the module holds: from the float32 master if that is what it is.

    Shapes: input ``[..., in_features]`` with one to four dimensions, output ``[..., out_features]``; any sizes, zero
    tokens included. Output dtype: autocast's where autocast is on, else the input's.
    The weight's gradient is computed in float32; a bfloat16 parameter gets it rounded once, and one that has a
    ``main_grad`` (float32) has it accumulated there, in float32, in place of ``.grad``.

    Args:
        recipe: a name, a path, a dict or a Recipe.
        backend: None chooses by the device of the weight, again when the module moves; or a request for
            ``backend.choose``.

    Raises:
        ValueError: a recipe or backend that cannot be; input of a wrong size or dtype.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *,
        recipe: str | dict | Recipe = "nvidia_nvfp4", backend: str | None = None, label: str = "linear",
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up(load_recipe(recipe), label, backend)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: str | dict | Recipe, label: str, backend: str | None = None
    ) -> "QuantizedLinear":
        """The quantized twin of ``linear``: shares its Parameter objects (ties stay tied), hooks and mode."""
        layer = cls.__new__(cls)
        layer.__dict__ = dict(linear.__dict__)
        layer._set_up(load_recipe(recipe), label, backend)
        return layer

    def _set_up(self, recipe: Recipe, label: str, backend: str | None) -> None:
        self.recipe = recipe
        self.plan = recipe.plan(0.0)
        self.label = label
        self.site = ledger.site(label)
        self.backend_request = backend
        self.backend = choose(self.weight.device, backend)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self.label}: input has shape {tuple(x.shape)}, in_features is {self.in_features}")
        if x.dtype not in INPUT_TYPES:
            raise ValueError(f"{self.label}: input must be float32, bfloat16 or float16, got {x.dtype}")
        device = x.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        where = self.site.shape[0]
        # drawn also where gradients are off, so that a checkpointed layer draws the same numbers when it is replayed
        seed = draw_seed(x, where) if self.plan.stochastic else None
        needs = (x.requires_grad, self.weight.requires_grad) if torch.is_grad_enabled() else (False, False)
        main_grad = getattr(self.weight, "main_grad", None)
        dtype = out_dtype if self.bias is None else torch.float32  # the bias joins before the one rounding
        y = LinearFunction.apply(
            x.reshape(x.shape[:-1].numel(), self.in_features), self.weight, main_grad, seed, where, self.plan,
            self.backend, dtype, needs,
        )  # fmt: skip
        if self.bias is not None:
            y = (y + self.bias.float()).to(out_dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.backend = choose(self.weight.device, self.backend_request)
        return self

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "site"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.site = ledger.site(self.label)  # sites are numbered anew in each process

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}, backend={self.backend}"
