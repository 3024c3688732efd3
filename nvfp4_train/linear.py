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
from nvfp4_train import layer_state, ledger, linear_mechanisms
from nvfp4_train.backend import Backend, choose
from nvfp4_train.gemm import matmul
from nvfp4_train.quantization import BF16, STREAM, QuantizedTensor, draw_seed, layer_input, needs_seed, quantize_both
from nvfp4_train.recipe import LinearPlan, Recipe, load_recipe
from nvfp4_train.sharding import Layout, is_sharded, shared_seed
from nvfp4_train.weight_cache import CachedWeight, quantized_weight


class LinearFunction(torch.autograd.Function):
    """``y [M, N] = x [M, K] @ w [N, K].T`` with the operands of ``plan``."""

    @staticmethod
    def forward(
        ctx, x, weight, main_grad, seed, where, plan: LinearPlan, backend: Backend, out_dtype, needs,
        layout: Layout | None = None, keep: bool = True, cache: CachedWeight | None = None,
    ):  # fmt: skip
        needs_dx, needs_dw = needs
        shared_weight = needs_dx and keep and transposes_exactly(plan)
        options = dict(seed=seed, backend=backend.quantize, where=where)
        # without the layer's own seed, layers that share an input (q, k, v) quantize it once when they are compiled
        input_options = options if needs_seed(plan.fprop_input, plan.wgrad_input) else options | {"seed": None}

        x_q, xt_q = quantize_both(
            x, plan.fprop_input, plan.wgrad_input if needs_dw else None, stream=STREAM["input"],
            rows_form=backend.operand_form, columns_form="packed", rows_name="fprop.input", columns_name="wgrad.input",
            part=layout and layout.input, **input_options,
        )  # fmt: skip
        w_q = quantized_weight(
            weight, plan.fprop_weight, cache, stream=STREAM["weight"],
            form=backend.form_of(shared_weight), name="fprop.weight", part=layout and layout.weight, **options,
        )  # fmt: skip
        y = matmul(x_q, w_q, out_dtype, backend=backend.matmul, where=where, gemm="fprop")

        kept_weight = w_q.packed_only() if shared_weight else (weight if needs_dx else None)
        _save(ctx, xt_q, kept_weight, w_q.global_amax if needs_dx and one_amax(plan) else None, seed, main_grad)
        ctx.where, ctx.plan, ctx.backend, ctx.needs = where, plan, backend, needs
        ctx.layout, ctx.cache = layout, cache
        ctx.dtypes = (x.dtype, weight.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        xt_q, kept_weight, weight_amax, seed, main_grad = _restore(ctx)
        plan, backend, where, layout = ctx.plan, ctx.backend, ctx.where, ctx.layout
        needs_dx, needs_dw = ctx.needs
        x_dtype, w_dtype = ctx.dtypes
        options = dict(seed=seed, backend=backend.quantize, where=where)

        dy_q, dyt_q = quantize_both(
            dy, plan.dgrad_grad_output if needs_dx else None, plan.wgrad_grad_output if needs_dw else None,
            stream=STREAM["grad_output"], rows_form=backend.operand_form, columns_form=backend.operand_form,
            rows_name="dgrad.grad_output", columns_name="wgrad.grad_output",
            part=layout and layout.grad_output, **options,
        )  # fmt: skip
        dx = dw = None
        if needs_dx:
            if isinstance(kept_weight, QuantizedTensor):
                wt_q = kept_weight.T
            else:
                wt_q = quantized_weight(
                    kept_weight, plan.dgrad_weight, ctx.cache, transpose=True, stream=STREAM["weight"],
                    form=backend.operand_form, name="dgrad.weight", part=layout and layout.weight,
                    amax=weight_amax, **options,
                )  # fmt: skip
            dx = matmul(dy_q, wt_q, x_dtype, backend=backend.matmul, where=where, gemm="dgrad")
        if needs_dw:
            product = dict(backend=backend.matmul, where=where, gemm="wgrad")
            if main_grad is not None:
                matmul(dyt_q, xt_q, torch.float32, accumulate_into=main_grad, **product)
            else:
                dw = matmul(dyt_q, xt_q, w_dtype, **product)
        return dx, dw, *[None] * 10


def transposes_exactly(plan: LinearPlan) -> bool:
    """Whether Dgrad can read Fprop's quantized weight the other way round, bit for bit."""
    return plan.shares_weight


def one_amax(plan: LinearPlan) -> bool:
    """Whether Dgrad's weight has the global amax of Fprop's: neither is transformed before it is taken."""
    schemes = [None if text == BF16 else Scheme.parse(text) for text in (plan.fprop_weight, plan.dgrad_weight)]
    return all(scheme is not None and scheme.has_global_scale and not scheme.hadamard for scheme in schemes)


def _save(ctx, xt_q, kept_weight, weight_amax, seed, main_grad) -> None:
    """Tensors go through ``save_for_backward`` (hooks and checkpointing see them there), the rest stays plain."""
    ctx.kept = []
    tensors = []
    for item in (xt_q, kept_weight):
        parts = tuple(item) if isinstance(item, QuantizedTensor) else (item,)
        ctx.kept.append([None if isinstance(part, Tensor) else part for part in parts])
        tensors += [part if isinstance(part, Tensor) else None for part in parts]
    ctx.save_for_backward(*tensors, weight_amax, seed)
    ctx.main_grad = main_grad  # written to in backward, so autograd must not track its version


def _restore(ctx):
    *tensors, weight_amax, seed = ctx.saved_tensors
    items = []
    for plain in ctx.kept:
        parts = [value if saved is None else saved for value, saved in zip(plain, tensors, strict=False)]
        tensors = tensors[len(plain):]
        items.append(QuantizedTensor(*parts) if len(parts) > 1 else parts[0])
    xt_q, kept_weight = items
    return xt_q, kept_weight, weight_amax, seed, ctx.main_grad


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` with quantized Fprop, Dgrad and Wgrad; parameters and state_dict are those of ``nn.Linear``.

    The weight is quantized from the parameter the module holds: from the float32 master if that is what it is.

    Shapes: input ``[..., in_features]`` with one to four dimensions, output ``[..., out_features]``; any sizes, zero
    tokens included. Under autocast the input is cast to autocast's dtype first, as in ``nn.Linear``. Output dtype: the
    input's, so cast.
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
        self._choose_backend()
        self.sharded_at_rest = False
        self.weight_cache = None
        layer_state.prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self.label}: input has shape {tuple(x.shape)}, in_features is {self.in_features}")
        x = layer_input(x, self.label)
        out_dtype = x.dtype
        where = self.site.shape[0]
        weight, bias, layout, restore = self.weight, self.bias, None, None
        if is_sharded(x) or is_sharded(weight):
            from nvfp4_train.parallel import localize  # DTensor takes a while to import, and few need it

            x, weight, bias, layout, restore = localize(self.label, self.plan, x, weight, bias)
        # drawn also where gradients are off, so that a checkpointed layer draws the same numbers when it is replayed
        seed = draw_seed(x, where) if self.plan.stochastic else None
        if seed is not None and layout is not None:
            seed = shared_seed(seed, layout.group)
        needs = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
        main_grad = getattr(self.weight, "main_grad", None)
        dtype = out_dtype if bias is None else torch.float32  # the bias joins before the one rounding
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        if self.plan.simple:
            y = LinearFunction.apply(
                rows, weight, main_grad, seed, where, self.plan, self.backend, dtype, needs, layout,
                not self.sharded_at_rest, self.weight_cache,
            )  # fmt: skip
        else:  # splits, requantizes, masks or remembers operands
            y = linear_mechanisms.run(self, rows, weight, main_grad, seed, where, dtype, needs, layout)
        if bias is not None:
            y = (y + bias.float()).to(out_dtype)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if restore is None else restore(y)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight" and value is not None and "backend" in self.__dict__:
            # FSDP takes this way, in place of its shortcut into _parameters, for a module with a __setattr__ of its
            # own: with the shard when it takes over and after each use, with the whole weight before one.
            self.sharded_at_rest = self.sharded_at_rest or is_sharded(value)
            if value.device.type != self.device_type:
                self._choose_backend()

    def _choose_backend(self) -> None:
        self.device_type = self.weight.device.type
        self.backend = choose(self.weight.device, self.backend_request, self.recipe.operand_texts)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._choose_backend()
        return self

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "site"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.site = ledger.site(self.label)  # sites are numbered anew in each process

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}, backend={self.backend}"
