"""The 4-bit weights of a converted model: which format they are in, and their bytes, from ``quantize`` itself."""

import torch
from torch import Tensor

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.exporting import layouts
from nvfp4_train.exporting.layouts import Packed
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.quantization import BF16, quantize
from nvfp4_train.swapping import Quantized
from nvfp4_train.transposed import QuantizedConv1D


class ExportError(ValueError):
    """A model that cannot be exported; nothing was written."""


def kind_of(layers: dict[str, QuantizedLinear | Quantized], format: str) -> str:
    """The one 4-bit format of all layers; refuses, by name, what the format cannot say."""
    kinds = {}
    for name, layer in layers.items():
        text = layer.plan.fprop_weight
        if text == BF16:
            told = "Fprop runs in BF16 at this point of the recipe's schedule; there is no 4-bit weight"
            raise ExportError(f"{name}: {told}")
        if isinstance(layer, QuantizedConv1D):
            raise ExportError(f"{name}: engines read the transposed weights of Conv1D only unpacked")
        scheme = Scheme.parse(text)
        kind = _readable(scheme)
        if kind is None:
            raise ExportError(f"{name}: only NVFP4 and MXFP4 weights can be exported, not {text}")
        if kind == "mxfp4" and format == "modelopt":
            raise ExportError(f"{name}: weights are MXFP4, which modelopt has no folder for: use compressed-tensors")
        kinds[kind] = name
    if len(kinds) > 1:
        raise ExportError(f"layers of several formats ({', '.join(kinds)}) cannot go into one folder")
    return next(iter(kinds))


def _readable(scheme: Scheme) -> str | None:
    """What engines call a weight of this scheme; None for one that is more than code x block scale x global scale."""
    simple = scheme.element == "e2m1" and not (scheme.stochastic or scheme.hadamard or scheme.split or scheme.outer)
    if not simple or scheme.block[0] < 1:
        return None
    if scheme.scale == "e4m3" and scheme.rule == "nvfp4" and scheme.block[1] == layouts.GROUP["nvfp4"]:
        return "nvfp4"
    if scheme.scale == "e8m0" and scheme.factor == 1.0 and scheme.block[1] == layouts.GROUP["mxfp4"]:
        return "mxfp4"
    return None


def pack(name: str, layer: QuantizedLinear | Quantized, kind: str, input_amax: dict | None) -> dict[str, list[Packed]]:
    """The quantized weights of a layer by state_dict name; experts give one for each, a linear layer gives one."""
    weights = layer.weights() if isinstance(layer, Quantized) else {"weight": layer.weight}
    found = {}
    for key, weight in weights.items():
        label = f"{name}.{key}"
        inputs = label if len(weights) > 1 else name
        if input_amax is not None and inputs not in input_amax:
            raise ExportError(f"{inputs}: calibration saw no input of it; calibrate with more text")
        matrices = weight.detach().unbind() if weight.dim() == 3 else [weight.detach()]
        if getattr(layer, "is_transposed", False):
            raise ExportError(f"{label}: experts kept as [in, out] have no 4-bit layout that engines agree on")
        if matrices[0].shape[1] % layouts.GROUP[kind]:
            raise ExportError(
                f"{label}: its {matrices[0].shape[1]} columns are no multiple of {layouts.GROUP[kind]}, which engines "
                "need; keep it in BF16 by the recipe's keep_bf16.modules"
            )
        amax = None if input_amax is None else torch.tensor(input_amax[inputs])
        found[label] = [quantized_weight(matrix, layer, kind)._replace(input_amax=amax) for matrix in matrices]
    return found


def quantized_weight(matrix: Tensor, layer: QuantizedLinear | Quantized, kind: str, amax: Tensor | None = None):
    """Packed: ``matrix [N, K]`` as the layer's Fprop quantizes it; with another amax where one is given."""
    scheme = Scheme.parse(layer.plan.fprop_weight)
    q = quantize(matrix, layer.plan.fprop_weight, backend=layer.backend.quantize, amax=amax)
    scales = q.scale_bytes.repeat_interleave(scheme.block[0], dim=0)[: len(matrix)]
    if kind == "mxfp4":
        return Packed(kind, q.codes, scales)
    return Packed(kind, q.codes, scales, q.global_amax, divisor=scheme.divisor)
