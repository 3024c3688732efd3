"""Faults to plant in the library, each the way it has happened somewhere: nothing raises, the loss still falls.

``FAULTS``: name -> (plant, recipe, the names of the checks one of which must find it). ``plant(patch, model)`` changes
the library through pytest's monkeypatch; the model is converted already.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import nvfp4_train as nt
from nvfp4_train import gemm, linear, quantization
from nvfp4_train.linear import LinearFunction, QuantizedLinear
from nvfp4_train.quantization import QuantizedTensor
from nvfp4_train.recipe import Recipe


class TaggedLinear(nn.Linear):
    """A subclass that adds nothing: what one library skips without a word."""


class Block(nn.Module):
    def __init__(self, size, kind=nn.Linear):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.up, self.down = kind(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.query(y), self.key(y), y, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=1, size=48, vocabulary=32, kind=nn.Linear):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Block(size, kind) for _ in range(blocks))
        self.lm_head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model(recipe, blocks=1, **options):
    """Converted, with more blocks where the recipe keeps some."""
    torch.manual_seed(0)
    keep = nt.load_recipe(recipe).keep_bf16.blocks
    while keep is not None and sum(keep.kept(blocks)) >= blocks:
        blocks += 1
    net = Model(blocks, **options)
    nt.convert(net, recipe)
    return net


def microbatches(net, forward=None):
    """Two of them, 46 tokens each: no multiple of 16, so that every operand along the tokens is padded."""
    device = next(net.parameters()).device
    tokens = torch.randint(0, 32, (2, 2, 24), generator=torch.Generator().manual_seed(1)).to(device)

    def loss(part):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = (forward or net)(part[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())

    return [lambda part=part: loss(part) for part in tokens]


def _through(patch, change):
    """Every quantization through ``change(run, x, rows, columns, options)``; ``run`` is the kernel as it should be."""
    run = quantization.reference.quantize
    patch.setattr(
        quantization.reference, "quantize", lambda x, rows, columns, **options: change(run, x, rows, columns, options)
    )


def _with_scheme(patch, chosen, **changes):
    """Schemes that ``chosen`` says yes to are run with other fields, under their old names."""

    def other(scheme):
        return replace(scheme, **changes) if scheme is not None and chosen(scheme) else scheme

    _through(patch, lambda run, x, rows, columns, options: run(x, other(rows), other(columns), **_own_amax(options)))


def _own_amax(options):
    return {key: value for key, value in options.items() if key not in ("amax_rows", "amax_columns")}


def nearest_for_stochastic(patch, net):
    _with_scheme(patch, lambda s: s.stochastic, rounding="nearest")


def biased_rounding(patch, net):
    def change(run, x, rows, columns, options):
        if rows is not None and rows.stochastic:  # every element but its block's largest is rounded from 0.97 of it
            blocks = x.unflatten(1, (-1, rows.block[1]))
            largest = blocks.abs().amax(2, keepdim=True)
            smaller = torch.where(blocks.abs() == largest, blocks, 0.97 * blocks).flatten(1)
            return run(smaller, rows, None, **options)[0], run(x, None, columns, **options)[1]
        return run(x, rows, columns, **options)

    _through(patch, change)


def hadamard_dropped(patch, net):
    def change(run, x, rows, columns, options):
        forms = run(x, rows, columns, **options)
        if columns is None or not columns.hadamard or not columns.stochastic:
            return forms
        padded = F.pad(x, (0, 0, 0, -len(x) % columns.group))
        return forms[0], run(padded, None, replace(columns, hadamard=0), **_own_amax(options))[1]

    _through(patch, change)


def signs_differ(patch, net):
    _with_scheme(patch, lambda s: s.hadamard and s.stochastic, sign_mask=0x1234)


def signs_not_drawn(patch, net):
    _with_scheme(patch, lambda s: s.sign_mask == "step", sign_mask=0)


def four_over_six_ignored(patch, net):
    _with_scheme(patch, lambda s: s.select, select="")


def one_dimensional_weights(patch, net):
    _with_scheme(patch, lambda s: s.block == (16, 16), block=(1, 16))


def stale_weight(patch, net):
    kept, weights = {}, {p.data_ptr() for p in net.parameters()}

    def change(run, x, rows, columns, options):
        key = (x.data_ptr(), tuple(x.shape), rows, columns)
        if x.data_ptr() not in weights:
            return run(x, rows, columns, **options)
        if key not in kept:
            kept[key] = run(x, rows, columns, **options)
        return kept[key]

    _through(patch, change)


def transposed_weight_requantized(patch, net):
    whole = QuantizedTensor.T.fget

    def transpose(self):
        if "16x16" not in self.scheme_text:
            return whole(self)
        line = self.scheme_text.replace("16x16", "1x16")
        anew = nt.quantize(self.dequantize().T.contiguous(), line, form="both")
        return anew._replace(scheme_text=self.scheme_text)

    patch.setattr(QuantizedTensor, "T", property(transpose))


def wrong_block_axis(patch, net):
    weights = {p.data_ptr() for p in net.parameters()}

    def change(run, x, rows, columns, options):
        if columns is None or x.data_ptr() not in weights:
            return run(x, rows, columns, **options)
        options = _own_amax(options) | {"rows_form": options["columns_form"]}
        row_form = run(x, columns, None, **options)[0]
        return None, row_form._replace(operand=row_form.operand.T)

    _through(patch, change)


def padding_leaks(patch, net):
    def change(run, x, rows, columns, options):
        forms = run(x, rows, columns, **options)
        missing = 0 if columns is None else -len(x) % columns.group
        if not missing or not columns.hadamard:
            return forms
        padded = F.pad(x, (0, 0, 0, missing), value=float(x.abs().mean()))
        return forms[0], run(padded, None, columns, **_own_amax(options))[1]

    _through(patch, change)


def unconverted_layer(patch, net):
    layer = net.layers[0].down
    plain = nn.Linear(layer.in_features, layer.out_features)
    plain.weight, plain.bias = layer.weight, layer.bias
    net.layers[0].down = plain


def subclass_skipped(patch, net):
    for block in net.layers:
        layer = block.up
        plain = TaggedLinear(layer.in_features, layer.out_features)
        plain.weight, plain.bias = layer.weight, layer.bias
        block.up = plain


def kept_layer_converted(patch, net):
    net.lm_head = QuantizedLinear.from_linear(net.lm_head, nt.load_recipe("nvidia_nvfp4"), "lm_head")


def bf16_in_backward(patch, net):
    class Fallback(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, main_grad, seed, where, plan, backend, out_dtype, needs, *others):
            ctx.save_for_backward(x, weight)
            with torch.no_grad():
                ctx.others = len(others)
                settings = (main_grad, seed, where, plan, backend, out_dtype, (False, False), *others)
                return LinearFunction.apply(x.detach(), weight.detach(), *settings)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            dy, x16, w16 = (t.to(torch.bfloat16) for t in (dy, x, weight))
            return (dy @ w16).to(x.dtype), (dy.T @ x16).to(weight.dtype), *[None] * (7 + ctx.others)

    patch.setattr(linear, "LinearFunction", Fallback)


def weight_not_quantized(patch, net):
    whole = gemm.matmul

    def matmul(a, b, *args, **options):
        if options.get("gemm") == "fprop":
            layers = [module for module in net.modules() if isinstance(module, QuantizedLinear)]
            source = next(layer.weight for layer in layers if layer.site.shape[0] == options["where"])
            factor = 2688.0 / b.global_amax
            b = b._replace(operand=(source.detach() * factor).to(torch.bfloat16))
        return whole(a, b, *args, **options)

    patch.setattr(linear, "matmul", matmul)


def schedule_a_step_late(patch, net):
    whole = Recipe.plan
    patch.setattr(Recipe, "plan", lambda self, progress=0.0, *rest: whole(self, max(0.0, progress - 1e-6)))
    net.layers[0].up.plan = whole(net.layers[0].up.recipe, 0.0)


def schedule_stuck(patch, net):
    whole = Recipe.plan
    patch.setattr(Recipe, "plan", lambda self, progress=0.0, *rest: whole(self, 0.0))


def seeds_repeated(patch, net):
    patch.setattr(linear, "draw_seed", lambda x, where: torch.tensor(7))


def seeds_repeated_across_calls(patch, net):
    patch.setattr(linear, "draw_seed", lambda x, where: torch.tensor(where))


def scale_after_rounding(patch, net):
    def emulated(a, b, alpha, out_dtype, *others):
        product = (a.float() @ b.float().T).to(torch.bfloat16)
        return (product.float() if alpha is None else product.float() * alpha).to(out_dtype)

    patch.setattr(gemm, "_emulated", emulated)


def scale_forgotten(patch, net):
    whole = gemm.global_scale
    patch.setattr(gemm, "global_scale", lambda a, b: whole(a, b) * 0.5)


def bias_gradient_lost(patch, net):
    whole = QuantizedLinear.forward

    def forward(self, x):
        bias, self._parameters["bias"] = self.bias, None
        y = whole(self, x)
        self._parameters["bias"] = bias
        return y if bias is None else (y.float() + bias.detach().float()).to(y.dtype)

    patch.setattr(QuantizedLinear, "forward", forward)


def activation_of_another_microbatch(patch, net):
    whole, before = linear.quantize_both, {}

    def quantize_both(x, rows, columns, **options):
        row_form, column_form = whole(x, rows, columns, **options)
        if options["columns_name"] == "wgrad.input" and column_form is not None:
            # the buffer was not filled anew: what the layer saved last time is still there
            column_form = before.setdefault(options["where"], column_form)
        return row_form, column_form

    patch.setattr(linear, "quantize_both", quantize_both)


def weight_gradient_doubled(patch, net):
    whole = LinearFunction.backward

    def backward(ctx, dy):
        dx, dw, *others = whole(ctx, dy)
        return dx, None if dw is None else 2 * dw, *others

    patch.setattr(LinearFunction, "backward", staticmethod(backward))


def other_recipe(patch, net):
    for layer in net.modules():
        if isinstance(layer, QuantizedLinear):
            layer.recipe = nt.load_recipe("mxfp4")


FAULTS = {
    "SR replaced by nearest": (nearest_for_stochastic, "nvidia_nvfp4", {"sr_inactive"}),
    "SR leans to zero": (biased_rounding, "nvidia_nvfp4", {"sr_biased"}),
    "Hadamard dropped on one operand": (hadamard_dropped, "nvidia_nvfp4", {"hadamard_missing"}),
    "signs differ": (signs_differ, "nvidia_nvfp4", {"hadamard_signs"}),
    "signs that should be drawn are fixed": (signs_not_drawn, "mxfp4_tseng", {"hadamard_signs"}),
    "4/6 ignored": (four_over_six_ignored, "four_over_six", {"four_over_six"}),
    "1-D blocks on weights": (one_dimensional_weights, "nvidia_nvfp4", {"block_shape"}),
    "stale weight after an optimizer step": (stale_weight, "nvidia_nvfp4", {"stale_weight"}),
    "transposed weight requantized": (transposed_weight_requantized, "nvidia_nvfp4", {"weight_mismatch"}),
    "one layer left unconverted": (unconverted_layer, "nvidia_nvfp4", {"not_converted"}),
    "a subclass of Linear skipped": (subclass_skipped, "nvidia_nvfp4", {"not_converted"}),
    "a kept layer converted": (kept_layer_converted, "nvidia_nvfp4", {"keep_bf16"}),
    "BF16 fallback in backward only": (bf16_in_backward, "nvidia_nvfp4", {"gemm_missing"}),
    "weight multiplied unquantized": (weight_not_quantized, "nvidia_nvfp4", {"bf16_fallback"}),
    "schedule one step late": (schedule_a_step_late, "nvidia_nvfp4_late_fprop", {"schedule"}),
    "schedule off by one phase": (schedule_stuck, "nvidia_nvfp4_late_fprop", {"schedule"}),
    "seeds repeated across layers": (seeds_repeated, "nvidia_nvfp4", {"seed_repeated"}),
    "seeds repeated across calls": (seeds_repeated_across_calls, "nvidia_nvfp4", {"seed_repeated"}),
    "global scale applied after rounding": (scale_after_rounding, "nvidia_nvfp4", {"rounded_twice"}),
    "global scale halved": (scale_forgotten, "nvidia_nvfp4", {"global_scale"}),
    "padding leaks": (padding_leaks, "nvidia_nvfp4", {"padding"}),
    "bias gradient lost": (bias_gradient_lost, "nvidia_nvfp4", {"bias_gradient"}),
    "wrong block axis": (wrong_block_axis, "nvidia_nvfp4_1d_weights", {"block_axis"}),
    "activation of another microbatch": (activation_of_another_microbatch, "nvidia_nvfp4", {"other_microbatch"}),
    "weight gradient doubled": (weight_gradient_doubled, "nvidia_nvfp4", {"gradient"}),
    "another recipe's formats": (other_recipe, "nvidia_nvfp4", {"format"}),
}
