"""The products of recipes that do more than quantize two operands for each GEMM; linear.py has the plain ones.

    split: mean       x = 1 m.T + r; r is quantized, the mean m over the tokens is not:   y = r_q w_q.T + 1 (w_q m).T
                      Wgrad, with dy = 1 g.T + s:  dw = s_q.T r_q + M g m.T   (the crossed products vanish: r and s
                      have no mean)
    split: channels   the channels h of the features are quantized apart:   y = x_q w_q.T + x[:, h]_q w[:, h]_q.T
                      Wgrad: dw[:, h] = (dy.T)_q (x[:, h].T)_q.T
    requantize        Dgrad's weight and Wgrad's input are quantized from what Fprop quantized (and dequantized)
    mask_clipped      the gradient of what saturated in Fprop is zero
    delayed           amaxes come from the steps before (layer_state.py)

If Fprop rotates its operands, a requantized GEMM works in the rotated space: its result is masked there and rotated
back. Products of a mean are vectors times matrices, in float32; they are no GEMMs and are not counted as such.

Sources: Averis (arXiv:2603.10444), TetraJet-v2 (2510.27527), Quartet (2505.14669) and Quartet II (2601.22813).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_kernels.reference.codecs import unpack_bits
from nvfp4_kernels.reference.hadamard import rotate, rotate_back, step_signs
from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_train import layer_state
from nvfp4_train.backend import Backend
from nvfp4_train.gemm import matmul
from nvfp4_train.operators import operator, shapes_of
from nvfp4_train.quantization import BF16, STREAM, QuantizedTensor, quantize, quantize_both
from nvfp4_train.recipe import LinearPlan
from nvfp4_train.saving import restore, save
from nvfp4_train.weight_cache import quantized_weight

HOT = 8  # added to the stream of a tensor: the draws of its channels apart
APART = "emulated"  # their product: few of their formats are FP4
COLUMNS = ("dgrad_weight", "wgrad_grad_output", "wgrad_input")  # operands that are transposes


class Memory(NamedTuple):
    """What a layer remembers, for one call: amax histories by operand, and the channels apart (int64, ascending)."""

    histories: dict[str, Tensor]
    channels: Tensor | None


class Side(NamedTuple):
    """One operand: what is quantized, the channels apart, and the mean that both lack (float32 vector)."""

    main: QuantizedTensor
    hot: QuantizedTensor | None = None
    mean: Tensor | None = None


def run(layer: nn.Module, x: Tensor, weight: Tensor, main_grad, seed, where: int, dtype, needs, layout=None) -> Tensor:
    """``y [M, N] = x [M, K] @ weight [N, K].T`` in ``dtype`` with the mechanisms of ``layer.plan``.

    Raises ValueError for a sharded layer, and for a recipe that remembers steps where none was begun.
    """
    if layout is not None:
        raise ValueError(
            f"{layer.label}: recipe {layer.recipe.name} splits, requantizes, masks or remembers operands, which is not "
            "possible in a layer that is sharded over ranks: choose another recipe, or keep the layer in bf16"
        )
    plan = layer.plan
    schemes = _schemes(plan)
    histories = {name: f"{layer_state.PREFIX}{name}" for name, scheme in schemes.items() if scheme and scheme.history}
    channels = None
    split = next(
        (s.split for s in (schemes["fprop_input"], schemes["wgrad_input"]) if s and s.split and s.split.hot), None
    )
    if histories or (split is not None and split.observe is not None):
        layer_state.step_of(layer)
    if split is not None:
        channels = layer_state.hot_channels(layer, split, x)
    # histories learn from training only
    kept = {n: layer._buffers[b] if any(needs) else layer._buffers[b].clone() for n, b in histories.items()}
    return MechanismFunction.apply(
        x, weight, main_grad, seed, where, plan, layer.backend, dtype, needs, Memory(kept, channels)
    )


class MechanismFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, main_grad, seed, where, plan: LinearPlan, backend: Backend, dtype, needs, memory: Memory
    ):
        schemes = _schemes(plan)
        needs_dx, needs_dw = needs
        options = dict(seed=seed, backend=backend.quantize, where=where)
        again = {
            name: schemes[name] is not None and schemes[name].requantized for name in ("dgrad_weight", "wgrad_input")
        }
        keeps_x = needs_dw and again["wgrad_input"]
        keeps_w = needs_dx and (again["dgrad_weight"] or plan.shares_weight)

        forms = (backend.form_of(keeps_x), "packed" if needs_dw and not keeps_x else None)
        x_f, x_b = _both(x, ("fprop_input", "wgrad_input"), plan, memory, forms, options)
        fprop_hot = memory.channels if _part(schemes["fprop_input"]) == "channels" else None
        form = backend.form_of(needs_dx or x_f.mean is not None)
        w_f = _weight(weight, plan, schemes, fprop_hot, memory, form, options)
        y = _product(x_f, w_f, dtype, backend=backend.matmul, where=where, gemm="fprop")

        kept_x = x_f if keeps_x else x_b if needs_dw else Side(None)
        kept_w = w_f if keeps_w else Side(weight if needs_dx else None)
        masks = (x_f.main.mask if needs_dx else None, w_f.main.mask if needs_dw else None)
        save(
            ctx, _packed(kept_x.main), _packed(kept_x.hot), kept_x.mean, _packed(kept_w.main), _packed(kept_w.hot),
            *masks, memory.channels, seed,
        )  # fmt: skip
        ctx.main_grad, ctx.histories = main_grad, memory.histories  # written to in backward: not for autograd to track
        ctx.where, ctx.plan, ctx.backend, ctx.needs = where, plan, backend, needs
        ctx.like = (x.dtype, weight.dtype, x.shape[1])
        return y

    @staticmethod
    def backward(ctx, dy):
        x_main, x_hot, x_mean, w_main, w_hot, x_mask, w_mask, channels, seed = restore(ctx)
        plan, backend, where = ctx.plan, ctx.backend, ctx.where
        needs_dx, needs_dw = ctx.needs
        x_dtype, w_dtype, features = ctx.like
        schemes = _schemes(plan)
        options = dict(seed=seed, backend=backend.quantize, where=where)
        product = dict(backend=backend.matmul, where=where)

        names, memory = ("dgrad_grad_output", "wgrad_grad_output"), Memory(ctx.histories, None)
        forms = tuple(backend.operand_form if needed else None for needed in ctx.needs)
        dy_d, dy_w = _both(dy, names, plan, memory, forms, options)
        dx = dw = None
        if needs_dx:
            rotated = schemes["dgrad_weight"] is not None and schemes["dgrad_weight"].requantized
            if isinstance(w_main, QuantizedTensor) and not rotated:
                wt = w_main.T
            else:
                source = _whole(Side(w_main, w_hot), channels) if rotated else w_main
                wt = _quantize_one(source, "dgrad_weight", backend.form_of(True), plan, ctx.histories, options)
            dx = _product(dy_d, Side(wt), torch.float32, gemm="dgrad", **product)
            dx = _through_fprop(dx, "fprop_input", plan, x_mask, rotated, seed, features).to(x_dtype)
        if needs_dw:
            rotated = schemes["wgrad_input"] is not None and schemes["wgrad_input"].requantized
            xt = x_main
            if rotated:
                source = _whole(Side(x_main, x_hot), channels)
                source, x_hot = _apart(source, "wgrad_input", schemes["wgrad_input"], channels, options)
                xt = _quantize_one(source, "wgrad_input", backend.operand_form, plan, ctx.histories, options)
            dw = matmul(dy_w.main, xt, torch.float32, gemm="wgrad", **product)
            if x_mean is not None:
                dw = dw + dy.shape[0] * torch.outer(dy_w.mean, x_mean)
            if x_hot is not None:
                dyt_hot = _hot(dy, "wgrad_grad_output", x_hot.scheme_text, options)
                apart = matmul(dyt_hot, x_hot, torch.float32, backend=APART, where=where, gemm="wgrad")
                dw = dw.index_copy(1, channels, apart)
            dw = _through_fprop(dw, "fprop_weight", plan, w_mask, rotated, seed, features)
            if ctx.main_grad is not None:
                ctx.main_grad.add_(dw)
                dw = None
            else:
                dw = dw.to(w_dtype)
        return dx, dw, *[None] * 8


def _schemes(plan: LinearPlan) -> dict[str, Scheme | None]:
    return {name: None if text == BF16 else Scheme.parse(text) for name, text in plan._asdict().items()}


def _part(scheme: Scheme | None) -> str | None:
    return None if scheme is None or scheme.split is None else scheme.split.part


def _both(t, names, plan, memory: Memory, forms, options) -> tuple[Side | None, Side | None]:
    """The row form and the column form of ``t``, each with the parts that its operand sets apart; None for no form."""
    schemes = [_schemes(plan)[name] for name in names]
    parts = [_part(scheme) if form else None for scheme, form in zip(schemes, forms, strict=True)]
    mean = None
    if "mean" in parts:
        mean = t.float().mean(dim=0) if t.shape[0] else t.new_zeros(t.shape[1], dtype=torch.float32)
    sources, hots = [], []
    for name, scheme, part in zip(names, schemes, parts, strict=True):
        cold, hot = _apart(t, name, scheme, memory.channels if part == "channels" else None, options)
        sources.append(t.float() - mean if part == "mean" else cold)
        hots.append(hot)
    if all(forms) and parts[0] == parts[1] and not any(name in memory.histories for name in names):
        rows_name, columns_name = (name.replace("_", ".", 1) for name in names)
        mains = quantize_both(  # from one read, and with the same draws
            sources[0], *(getattr(plan, name) for name in names), stream=STREAM[names[0].split("_", 1)[1]],
            rows_form=forms[0], columns_form=forms[1], rows_name=rows_name, columns_name=columns_name, **options,
        )  # fmt: skip
    else:
        mains = [
            _quantize_one(source, name, form, plan, memory.histories, options) if form else None
            for source, name, form in zip(sources, names, forms, strict=True)
        ]
    means = [mean if part == "mean" else None for part in parts]
    sides = zip(mains, hots, means, strict=True)
    return tuple(None if main is None else Side(main, hot, mean) for main, hot, mean in sides)


def _quantize_one(t, name: str, form: str, plan: LinearPlan, histories, options) -> QuantizedTensor:
    """The operand ``name`` of ``plan`` from ``t``, the tensor that it is of (not its transpose)."""
    tensor = name.split("_", 1)[1]
    options = options | dict(
        stream=STREAM[tensor], form=form, name=name.replace("_", ".", 1), transpose=name in COLUMNS
    )
    if name in histories:
        options["amax"] = layer_state.delayed_amax_of(histories[name], t)
    if tensor == "weight":  # it may come quantized from FSDP
        return quantized_weight(t, getattr(plan, name), None, **options)
    return quantize(t, getattr(plan, name), **options)


def _apart(t, name: str, scheme: Scheme | None, channels, options) -> tuple[Tensor, QuantizedTensor | None]:
    """(``t`` with zeros in the channels apart, these in their own format); ``t`` itself where there are none."""
    if channels is None or _part(scheme) != "channels":
        return t, None
    hot = _hot(t.index_select(1, channels), name, scheme.split.hot_text, options)
    return t.index_fill(1, channels, 0.0), hot


def _hot(t, name: str, text: str, options) -> QuantizedTensor:
    """Channels apart of operand ``name``, quantized as ``text`` says."""
    return quantize(
        t, text, transpose=name in COLUMNS, stream=STREAM[name.split("_", 1)[1]] + HOT, form="both",
        name=name.replace("_", ".", 1), **options,
    )  # fmt: skip


def _weight(weight, plan, schemes, channels, memory: Memory, form: str, options) -> Side:
    """Fprop's weight; the columns of the channels apart go with them."""
    if channels is None:
        return Side(_quantize_one(weight, "fprop_weight", form, plan, memory.histories, options))
    text = schemes["fprop_input"].split.hot_text
    hot = _hot(weight.index_select(1, channels), "fprop_weight", text, options)
    cold = weight.index_fill(1, channels, 0.0)
    return Side(_quantize_one(cold, "fprop_weight", form, plan, memory.histories, options), hot)


def _product(a: Side, b: Side, dtype: torch.dtype, **options) -> Tensor:
    """``a @ b.T``, the parts apart included, with one rounding to ``dtype``."""
    if a.hot is None and a.mean is None:
        return matmul(a.main, b.main, dtype, **options)
    product = matmul(a.main, b.main, torch.float32, **options)
    if a.hot is not None:
        product = product + matmul(a.hot, b.hot, torch.float32, **options | {"backend": APART})
    if a.mean is not None:
        product = product + b.main.dequantize(torch.float32) @ a.mean
    return product.to(dtype)


def _packed(item):
    return item.packed_only()._replace(mask=None) if isinstance(item, QuantizedTensor) else item


def _whole(side: Side, channels: Tensor | None) -> Tensor:
    """float32: the values that Fprop used, in its rotated space where it rotates."""
    values = side.main.dequantize(torch.float32)
    if side.hot is not None:
        values = values.index_copy(1, channels, side.hot.dequantize(torch.float32))
    return values


def _through_fprop(grad, name: str, plan: LinearPlan, mask, rotated: bool, seed, columns: int) -> Tensor:
    """The gradient of a tensor from that of what Fprop quantized of it (``rotated``: in Fprop's rotated space, if
    any)."""
    text = getattr(plan, name)
    if mask is None and not (rotated and text != BF16 and Scheme.parse(text).hadamard):
        return grad[:, :columns]
    return _through_fprop_op(grad, mask, seed, text, rotated, columns)


@operator("through_fprop(Tensor grad, Tensor? mask, Tensor? seed, str scheme, bool rotated, SymInt columns) -> Tensor")
def _through_fprop_op(
    grad: Tensor, mask: Tensor | None, seed: Tensor | None, scheme: str, rotated: bool, columns: int
) -> Tensor:
    """float32 ``[R, columns]``: the mask applied where Fprop rounded, that is rotated there and back where it
    rotates."""
    parsed = Scheme.parse(scheme)
    size, signs = parsed.hadamard, parsed.sign_mask
    if size:
        signs = step_signs(seed, size) if signs == PER_STEP else signs
        if not rotated:
            padded = nn.functional.pad(grad, (0, -grad.shape[1] % parsed.group))
            grad = rotate(padded.contiguous(), size, signs, 1, torch.float32)
    if mask is not None:
        grad = grad * unpack_bits(mask, grad.shape[1])
    return (rotate_back(grad, size, signs) if size else grad)[:, :columns].contiguous()


@shapes_of(_through_fprop_op)
def _(grad, mask, seed, scheme, rotated, columns):
    return grad.new_empty(grad.shape[0], columns)
