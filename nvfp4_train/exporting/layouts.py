"""How serving engines want 4-bit weights to lie in a Hugging Face folder: names, conventions of scales, configs.

| format             | packed codes    | block scales   | global scale                        | inputs               |
|--------------------|-----------------|----------------|-------------------------------------|----------------------|
| modelopt           | `weight`        | `weight_scale` | `weight_scale_2` = amax / 2688      | `input_scale`        |
| compressed-tensors | `weight_packed` | `weight_scale` | `weight_global_scale` = 2688 / amax | `input_global_scale` |

Both: codes uint8 ``[N, K / 2]``, even index in the low nibble; E4M3 scales ``[N, K / 16]`` in row-major order (engines
swizzle them for their kernels when they load); float32 global scale. compressed-tensors stores the factor that went
*into* the quantizer, modelopt the one that comes out of it. MXFP4 (E8M0 bytes ``[N, K / 32]``, no global scale) exists
in compressed-tensors only.

With a calibrated scale for the inputs the folder says W4A4, without one W4A16.
Sources: compressed-tensors 0.20 (``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``), ModelOpt 0.47
(``convert_hf_config``, ``NVFP4QTensor``), and how vLLM loads both (``ModelOptNvFp4LinearMethod``,
``CompressedTensorsW4A4Fp4``).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_train.version import __version__

FORMATS = ("modelopt", "compressed-tensors")
LARGEST = 2688.0  # 448 x 6
GROUP = {"nvfp4": 16, "mxfp4": 32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Packed(NamedTuple):
    """A quantized weight ``[N, K]`` as a GEMM reads it: scales expanded to one for each row and group of columns."""

    kind: str  # nvfp4 | mxfp4
    codes: Tensor  # uint8 [N, K / 2]
    scales: Tensor  # uint8 [N, K / 16] E4M3, or [N, K / 32] E8M0
    amax: Tensor | None = None  # float32 scalar; None for mxfp4
    input_amax: Tensor | None = None  # float32 scalar, where inputs were calibrated
    divisor: float = LARGEST  # the global scale is amax / divisor: 2688, or less where a recipe leaves headroom

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def rows(self, index: Tensor) -> "Packed":
        return self._replace(codes=self.codes[index], scales=self.scales[index])

    def dequantize(self) -> Tensor:
        """float32 ``[N, K]``: code x (block scale x global scale), as the readers of both formats compute it."""
        values = torch.tensor(E2M1)[torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1).int()]
        if self.kind == "mxfp4":
            scales = torch.exp2(self.scales.float() - 127)
        else:
            scales = self.scales.view(torch.float8_e4m3fn).float() * (self.amax / self.divisor)
        return values * scales.repeat_interleave(GROUP[self.kind], dim=1)


def tensors(name: str, packed: Packed, format: str) -> dict[str, Tensor]:
    """The tensors of one quantized weight; ``name`` ends in ``.weight``."""
    stem = name.removesuffix(".weight")
    assert stem != name
    codes = f"{stem}.weight" if format == "modelopt" else f"{stem}.weight_packed"
    if packed.kind == "mxfp4":
        return {codes: packed.codes, f"{stem}.weight_scale": packed.scales}
    found = {codes: packed.codes, f"{stem}.weight_scale": packed.scales.view(torch.float8_e4m3fn)}
    given = {"weight": (packed.amax, packed.divisor), "input": (packed.input_amax, LARGEST)}
    for side, (amax, divisor) in given.items():
        if amax is None:
            continue
        amax = torch.where(amax > 0, amax, divisor)  # all zero: any scale will do, and 0 or Inf would not
        if format == "modelopt":
            found[f"{stem}.{'weight_scale_2' if side == 'weight' else 'input_scale'}"] = amax / divisor
        else:
            found[f"{stem}.{side}_global_scale"] = (divisor / amax).reshape(1)
    return found


def read(stem: str, get: dict[str, Tensor], format: str, kind: str) -> Packed:
    """The inverse of ``tensors``: the weight of the layer ``stem`` from the tensors of a folder."""
    codes = get[f"{stem}.weight" if format == "modelopt" else f"{stem}.weight_packed"]
    scales = get[f"{stem}.weight_scale"].view(torch.uint8)
    if kind == "mxfp4":
        return Packed(kind, codes, scales)
    if format == "modelopt":
        amax = get[f"{stem}.weight_scale_2"].float() * LARGEST
    else:
        amax = LARGEST / get[f"{stem}.weight_global_scale"].float()
    return Packed(kind, codes, scales, amax.reshape(()))


def config(kind: str, format: str, left: list[str], calibrated: bool) -> dict[str, Any]:
    """The ``quantization_config`` of config.json. ``left``: the linear modules that were not quantized."""
    number = {"num_bits": 4, "type": "float", "group_size": GROUP[kind]}
    if format == "modelopt":
        group = {"weights": {"dynamic": False, **number}, "targets": ["Linear"]}
        if calibrated:
            group["input_activations"] = {"dynamic": False, **number}
        return {
            "config_groups": {"group_0": group},
            "ignore": left,
            "quant_algo": "NVFP4" if calibrated else "W4A16_NVFP4",
            "producer": {"name": "nvfp4-train", "version": __version__},
            "quant_method": "modelopt",
        }
    number |= {"strategy": "tensor_group" if kind == "nvfp4" else "group", "symmetric": True}
    inputs = {**number, "dynamic": "local"} if calibrated else None
    pack = f"{kind}-pack-quantized"
    return {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**number, "dynamic": False}, "input_activations": inputs,
                        "output_activations": None, "format": pack}
        },
        "format": pack,
        "ignore": left,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


def legacy_config(quantization: dict[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json, which engines look for beside config.json in a folder of modelopt's."""
    return {
        "producer": quantization["producer"],
        "quantization": {
            "quant_algo": quantization["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": quantization["config_groups"]["group_0"]["weights"]["group_size"],
            "exclude_modules": quantization["ignore"],
        },
    }


def recognise(quantization: dict[str, Any]) -> tuple[str, str]:
    """(format, kind) of a ``quantization_config``. ValueError for one that this library does not write."""
    method = str(quantization.get("quant_method", ""))
    if method == "modelopt" and str(quantization.get("quant_algo")) in ("NVFP4", "W4A16_NVFP4"):
        return "modelopt", "nvfp4"
    for kind in GROUP:
        if method == "compressed-tensors" and quantization.get("format") == f"{kind}-pack-quantized":
            return "compressed-tensors", kind
    told = quantization.get("quant_algo") or quantization.get("format") or "no format"
    raise ValueError(f"its quantization_config is {method or 'of no method'} ({told}), which is not one of NVFP4's")
