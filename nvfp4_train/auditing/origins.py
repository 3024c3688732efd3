"""What each operand is quantized from, worked out from a call's input, weight and output gradient.

For most recipes the tensor itself. A split takes the mean or some channels out of it, a requantized operand is made
from what Fprop multiplied; module ``nvfp4_train.linear_mechanisms`` says what these are and whose they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.auditing.evidence import OPERANDS, Call
from nvfp4_train.auditing.operands import local, mask_of, prepared, rotation
from nvfp4_train.auditing.scale_rules import candidates
from nvfp4_train.recipe import BF16


def scheme_in(call: Call, name: str) -> Scheme | None:
    """The scheme of a main operand as it ran; None for BF16 and for a GEMM that did not run."""
    gemm = name.split(".")[0]
    product = call.products.get(gemm)
    if product is None:
        return None
    text = product.a_scheme if OPERANDS[gemm][0][0] == name else product.b_scheme
    return None if text == BF16 else Scheme.parse(text)


def mean_apart(call: Call, name: str) -> Tensor | None:
    """float64 [features]: the mean over the tokens that the operand lacks, or None."""
    scheme = scheme_in(call, name)
    source = call.source(name.split(".")[1])
    if scheme is None or scheme.split is None or scheme.split.part != "mean" or source is None:
        return None
    if name.split(".")[1] not in call.sources:
        return None  # a source that the quantizer was handed is the residual already
    return source.float().mean(0).double()


def channels_apart(call: Call) -> Tensor | None:
    """int64: the channels of the input that ran apart in this call, or None."""
    if not call.apart:
        return None
    if call.channels is not None:
        return call.channels
    schemes = (scheme_in(call, "fprop.input"), scheme_in(call, "wgrad.input"))
    split = next((s.split for s in schemes if s is not None and s.split is not None and s.split.hot is not None), None)
    source = call.source("input")
    if split is None or source is None:
        return None
    count = max(1, round(split.fraction * source.shape[1]))
    return torch.linalg.vector_norm(source, dim=0, dtype=torch.float32).topk(count).indices.sort().values


def origin(call: Call, name: str) -> Tensor | None:
    """The tensor that the main operand called ``name`` is quantized from, in the orientation of its source."""
    key = name.split(".")[1]
    source, scheme = call.source(key), scheme_in(call, name)
    if source is None or scheme is None:
        return source
    if scheme.requantized:
        return used_by_fprop(call, key).float()
    mean = mean_apart(call, name)
    if mean is not None:
        return source.float() - mean.float()
    split = scheme_in(call, "fprop.input") if key == "weight" else scheme
    gone = split is not None and split.split is not None and split.split.part == "channels"
    channels = channels_apart(call) if gone and name in ("fprop.input", "fprop.weight", "wgrad.input") else None
    return source if channels is None else source.index_fill(1, channels, 0.0)


def used_by_fprop(call: Call, key: str) -> Tensor:
    """float64: the values of ``input`` or ``weight`` that Fprop multiplied, in its rotated space if it has one."""
    product, second = call.products["fprop"], key == "weight"
    values = _values(call, product.b if second else product.a, f"fprop.{key}")
    apart, channels = call.apart.get("fprop"), channels_apart(call)
    if apart is not None and channels is not None:
        seen, text = (apart.b, apart.b_scheme) if second else (apart.a, apart.a_scheme)
        hot = call.source(key).index_select(1, channels)
        values = values.index_copy(1, channels, seen.double() * factor_of(Scheme.parse(text), hot, False))
    return values


def _values(call: Call, seen: Tensor, name: str) -> Tensor:
    scheme = scheme_in(call, name)
    if scheme is None:
        return seen.double()
    return seen.double() * factor_of(scheme, origin(call, name), False, amax=amax_of(call, name), seed=call.seed)


def amax_of(call: Call, name: str) -> Tensor | None:
    """The amax of delayed scaling, which comes from the steps before: as the quantizer was handed it."""
    scheme, event = scheme_in(call, name), call.quantizations.get(name)
    if name == "dgrad.weight" and event is None:  # read from Fprop's, the other way round
        event = call.quantizations.get("fprop.weight")
    delayed = scheme is not None and scheme.rule == "delayed"
    return event.made.amax if delayed and event is not None else None


def factor_of(
    scheme: Scheme | None, source: Tensor, transposed: bool, *, amax: Tensor | None = None, seed: Tensor | None = None
) -> Tensor:
    """float64 0-d: what an operand is multiplied by to give the source's values; the global scale lives here."""
    one = torch.ones((), dtype=torch.float64, device=source.device)
    if scheme is None:
        return one
    factor = one * scheme.factor
    if not scheme.has_global_scale:
        return factor
    if amax is None:
        mask = mask_of(source, transposed, source, scheme, seed) if scheme.hadamard else None
        z = prepared(source, transposed, scheme, mask)
        amax = z.abs().max() if z.numel() else one
    return factor * amax.double() / scheme.divisor


def as_source(call: Call, name: str, seen: Tensor, source: Tensor, transposed: bool) -> Tensor:
    """A main operand's values in the space of its origin: float64 of its shape, scaled and rotated back."""
    scheme = scheme_in(call, name)
    values = seen.double()
    if scheme is not None:
        values = values * factor_of(scheme, source, transposed, amax=amax_of(call, name), seed=call.seed)
        if scheme.hadamard:
            mask = mask_of(source, transposed, seen, scheme, call.seed)
            matrix = rotation(scheme.hadamard, mask).to(values)
            values = (values.view(len(values), -1, scheme.hadamard) @ matrix.T).view(values.shape)
    values = values[:, : source.shape[0] if transposed else source.shape[1]]
    return values.T if transposed else values


def unsaturated(call: Call, key: str) -> Tensor | None:
    """bool [R, K padded]: the elements of Fprop's operand that did not saturate; None unless the recipe masks those."""
    scheme = scheme_in(call, f"fprop.{key}")
    if scheme is None or not scheme.masked:
        return None
    source = call.source(key)
    own = local(scheme, source, False)
    z = prepared(source, False, scheme, mask_of(source, False, source, scheme, call.seed))
    blocks = z.view(len(z), -1, own.block[1])
    spread = blocks.std(2, correction=0) * own.clip if own.clip else blocks.abs().amax(2)
    unit = candidates(spread, z.abs().max(), own)[0].unit
    return (blocks.abs() / unit.unsqueeze(2).clamp(min=1e-300) <= own.number.largest).view(z.shape)
