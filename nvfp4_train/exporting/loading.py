"""Loading an exported folder, to go on training: 4-bit weights become parameters again, with the values Fprop saw."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from nvfp4_train.exporting import layouts
from nvfp4_train.exporting.writing import ExportError


def is_exported(folder: str | os.PathLike) -> bool:
    """Whether the folder's config.json speaks of quantized weights."""
    try:
        return bool(json.loads((Path(folder) / "config.json").read_text()).get("quantization_config"))
    except (OSError, ValueError, AttributeError):
        return False


def load_exported(folder: str | os.PathLike, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """A causal language model of transformers from a folder of ``export`` (or another's, of the same formats).

    The weights are code x block scale x global scale, in float32 and then ``dtype``. Converted by the recipe that made
    them, 16x16 weights in float32 come out as the same codes and scales (blocks whose scale is an E4M3 subnormal may
    move), so training goes on from what it was; what the rounding had taken off is gone.

    Args:
        options: for transformers' ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        ExportError (a ValueError): no such folder, another format, tensors that are missing, NaN or Inf.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = Path(folder)
    if not is_exported(folder):
        raise ExportError(f"{folder} is no folder of quantized weights (its config.json has no quantization_config)")
    settings = json.loads((folder / "config.json").read_text())
    try:
        format, kind = layouts.recognise(settings.pop("quantization_config"))
    except ValueError as error:
        raise ExportError(f"{folder}: {error}") from None
    config = options.pop("config", None) or AutoConfig.for_model(**settings)
    config.__dict__.pop("quantization_config", None)
    weights = _dequantized(_read_all(folder), format, kind, folder)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ExportError(f"{folder}: the weight {name} holds NaN or Inf")
    weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.items()}
    model, told = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
    )
    if missing := sorted(told["missing_keys"]):
        raise ExportError(f"{folder}: weights are missing: {', '.join(missing[:5])}")
    return model


def _read_all(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ExportError(f"{folder} has no .safetensors file")
    found = {}
    for file in files:
        try:
            found |= load_file(file)
        except Exception as error:  # torn files fail in as many ways as there are bytes in a header
            raise ExportError(f"{file} cannot be read: {error}") from error
    return found


def _dequantized(found: dict[str, Tensor], format: str, kind: str, folder: Path) -> dict[str, Tensor]:
    scales = [name.removesuffix(".weight_scale") for name in found if name.endswith(".weight_scale")]
    weights, used = {}, set()
    for stem in scales:
        try:
            weights[f"{stem}.weight"] = layouts.read(stem, found, format, kind).dequantize()
        except KeyError as error:
            raise ExportError(f"{folder}: the tensor {error.args[0]} is missing") from None
        used |= {name for name in found if name.rpartition(".")[0] == stem and not name.endswith(".bias")}
    return weights | {name: tensor for name, tensor in found.items() if name not in used}
