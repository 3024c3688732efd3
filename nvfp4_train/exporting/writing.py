"""export: a trained model becomes a folder that serving engines load; its 4-bit weights are those Fprop used.

The codes and block scales are taken from the same ``quantize`` that a layer calls, so they are the training's bit for
bit: a 16x16 tile's scale is repeated over its 16 rows, as it is for a GEMM. About 4.5 bits a weight (4.25 for MXFP4).
Matrices that the recipe left in BF16 are stored as BF16.

Two things a folder cannot carry over, both told in the report:
- Engines that fuse parallel layers (q, k, v; gate, up) into one matrix keep one global scale for it, the largest,
  and do not correct the others. ``shared_scales`` quantizes such layers with one amax: they load right everywhere, and
  are no longer the training's bits (the report says by how much).
- Inputs are quantized in training with their own amax each time. W4A4 engines want one fixed scale for them:
  ``calibrate`` measures it. Without it the folder is W4A16.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_train import ledger
from nvfp4_train.conversion import converted_layers
from nvfp4_train.exporting import layouts
from nvfp4_train.exporting.layouts import Packed
from nvfp4_train.exporting.names import Named, checkpoint_names
from nvfp4_train.exporting.packing import ExportError, kind_of, pack, quantized_weight
from nvfp4_train.sharding import is_sharded
from nvfp4_train.survey import Survey, is_convertible
from nvfp4_train.swapping import Quantized

# Layers that engines fuse into one matrix, by the last part of their names.
FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip


@dataclass
class ExportReport:
    """What an export wrote. ``bits_per_weight`` counts codes and all scales of the quantized layers."""

    folder: str
    format: str
    kind: str  # nvfp4 | mxfp4
    layers: list[str]
    left: list[str]
    bits_per_weight: float
    bytes: int
    calibrated: bool
    shared_scales: bool
    unequal_scales: list[list[str]] = field(default_factory=list)  # fused layers that keep scales of their own
    change: float = 0.0  # relative change of the weights by shared_scales, Frobenius norm

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {self.format}, {self.kind}, {'W4A4' if self.calibrated else 'W4A16'}; "
            f"{len(self.layers)} weights at {self.bits_per_weight:.3f} bits, {self.bytes / 1e6:.1f} MB in all",
        ]
        if self.unequal_scales:
            example = ", ".join(self.unequal_scales[0])
            lines.append(
                f"{len(self.unequal_scales)} groups of parallel layers (such as {example}) have global scales of their "
                "own, as in training: an engine that fuses them keeps only the largest and computes something else. "
                "For such engines export with shared scales"
            )
        if self.shared_scales:
            lines.append(f"parallel layers share a global scale; this changed the weights by {100 * self.change:.3f}%")
        return "\n".join(lines)


def export(
    model: nn.Module,
    folder: str | os.PathLike,
    format: str = "modelopt",
    *,
    shared_scales: bool = False,
    input_amax: dict[str, float] | None = None,
) -> ExportReport:
    """Writes a converted model of transformers as a Hugging Face folder of 4-bit weights.

    Args:
        model: converted (``nt.convert``), on any device, in any dtype; its schedule as training left it.
        format: ``modelopt`` or ``compressed-tensors``.
        folder: must not exist, or be empty.
        shared_scales: one global scale for the layers that engines fuse.
        input_amax: what ``calibrate`` returned.

    Raises:
        ExportError (a ValueError), with nothing written: weights that hold NaN or Inf; no quantized layer; a layer
            whose Fprop weight has no 4-bit form that the format knows; a folder that holds something.
    """
    folder = Path(folder)
    if format not in layouts.FORMATS:
        raise ExportError(f"unknown format {format!r}; expected {' or '.join(layouts.FORMATS)}")
    if not hasattr(model, "config") or not hasattr(model.config, "to_dict"):
        raise ExportError("only models of transformers can be exported (this one has no config to write)")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} exists and is not empty; name a new folder")
    _refuse_not_finite(model)
    layers = converted_layers(model)
    if not layers:
        raise ExportError("the model has no converted layer: call convert(model, recipe) first")
    kind = kind_of(layers, format)
    packed = {}  # by the name of the weight in the model's state_dict
    for name, layer in layers.items():
        packed |= pack(name, layer, kind, input_amax)
    names = checkpoint_names(model, {name: [p.codes.shape[0] for p in parts] for name, parts in packed.items()})
    pieces = {name: packed[piece.weight][piece.expert].rows(piece.rows) for name, piece in names.packed.items()}

    groups = [group for group in _fused(pieces) if len({float(pieces[name].amax) for name in group}) > 1]
    change = 0.0
    if shared_scales and groups:
        pieces, change = _share(model, layers, names, pieces, groups)
    written = {}
    for name, piece in pieces.items():
        written |= layouts.tensors(name, piece, format)
    size = sum(t.numel() * t.element_size() for t in written.values())
    weights = sum(piece.shape[0] * piece.shape[1] for piece in pieces.values())
    written |= {name: _stored(tensor) for name, tensor in names.plain.items()}

    left = _left(model, layers, names)
    quantization = layouts.config(kind, format, left, input_amax is not None)
    _write(model, folder, {k: v.cpu().contiguous() for k, v in written.items()}, quantization, names.untied)
    return ExportReport(
        str(folder), format, kind, sorted(pieces), left, 8 * size / weights,
        sum(t.numel() * t.element_size() for t in written.values()), input_amax is not None, shared_scales,
        [] if shared_scales else groups, change,
    )  # fmt: skip


class _InputAmax:
    """Looks at every quantized Fprop input and keeps the largest amax of each layer."""

    def __init__(self):
        self.found: dict[str, Tensor] = {}

    def quantized(self, event: ledger.Quantization) -> None:
        if event.operand == "fprop.input" and event.made.amax is not None:
            old = self.found.get(event.layer)
            self.found[event.layer] = event.made.amax if old is None else torch.maximum(old, event.made.amax)

    def multiplied(self, event: ledger.Product) -> None:
        pass


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, float]:
    """The amax of each converted layer's input over some batches of tokens (int64 ``[batch, length]``).

    Runs the model as training did (BF16 autocast). Raises ExportError where no input was quantized to NVFP4.
    """
    mode, seen = model.training, _InputAmax()
    model.eval()
    try:
        with ledger.observing(seen):
            for batch in batches:
                with torch.autocast(batch.device.type, dtype=torch.bfloat16):
                    model(input_ids=batch, use_cache=False)
    finally:
        model.train(mode)
    if not seen.found:
        raise ExportError("calibration saw no NVFP4 input: give at least one batch, and a recipe that quantizes inputs")
    # a part of a model that was converted by itself has labels that begin at the part
    places = {}
    for name, layer in converted_layers(model).items():
        keys = list(layer.weights()) if isinstance(layer, Quantized) else []
        places |= {f"{name}.{key}": f"{layer.label}.{key}" for key in keys} if len(keys) > 1 else {name: layer.label}
    return {name: float(seen.found[label]) for name, label in places.items() if label in seen.found}


def _refuse_not_finite(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if is_sharded(tensor):
            raise ExportError(f"the weight {name} is sharded over ranks: save a checkpoint and export that")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ExportError(f"the weight {name} holds NaN or Inf: a model like that is not exported")


def _fused(pieces: dict[str, Packed]) -> list[list[str]]:
    """Names of weights that engines fuse: siblings whose last parts stand together in FUSED."""
    groups = []
    for name, piece in pieces.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        for family in FUSED:
            if last == family[0] and piece.amax is not None:
                group = [f"{stem}.{other}.weight" for other in family if f"{stem}.{other}.weight" in pieces]
                groups += [group] if len(group) > 1 else []
    return groups


def _share(model, layers, names, pieces: dict[str, Packed], groups: list[list[str]]) -> tuple[dict[str, Packed], float]:
    """(pieces, relative change of all weights) with one amax for each group of fused layers."""
    pieces, moved, total = dict(pieces), 0.0, sum(float(p.dequantize().square().sum()) for p in pieces.values())
    for group in groups:
        amax = torch.stack([pieces[name].amax for name in group]).max()
        inputs = [pieces[name].input_amax for name in group]
        for name in group:
            piece, old = names.packed[name], pieces[name]
            layer, key = layers[piece.weight.rpartition(".")[0]], piece.weight.rpartition(".")[2]
            weight = getattr(layer, key).detach()
            matrix = weight[piece.expert] if weight.dim() == 3 else weight
            new = quantized_weight(matrix, layer, old.kind, amax).rows(piece.rows)
            pieces[name] = new._replace(input_amax=None if inputs[0] is None else torch.stack(inputs).max())
            moved += float((new.dequantize() - old.dequantize()).square().sum())
    return pieces, (moved / total) ** 0.5 if total else 0.0


def _stored(tensor: Tensor) -> Tensor:
    """What is not quantized: matrices in BF16, as autocast hands them to a GEMM; norms and biases as they are."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.dim() > 1 else tensor


def _left(model: nn.Module, layers: dict[str, Any], names: Named) -> list[str]:
    """Linear modules that stay in BF16, under the names of the folder: engines build all others as 4-bit layers."""
    survey = Survey(model)
    inside = tuple(f"{name}." for name in layers)
    found = [n for n, m in survey.modules.items() if is_convertible(m) and n not in layers and not n.startswith(inside)]
    found += [other.name.rpartition(".")[0] for other, _ in survey.other_weights() if not other.name.startswith(inside)]
    renamed = {names.module(name) for name in found if name}
    return sorted(renamed)


def _write(model, folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any], untied: bool) -> None:
    """Under another name first, then renamed: the folder is there whole or not at all."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    config["architectures"] = [type(model).__name__]
    if untied:
        config["tie_word_embeddings"] = False
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        split = split_torch_state_dict_into_shards(tensors)
        for file, keys in split.filename_to_tensors.items():
            save_file({key: tensors[key] for key in keys}, scratch / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (scratch / "config.json").write_text(json.dumps(config, indent=1))
        for file in split.filename_to_tensors:  # safetensors makes them for their owner's eyes alone
            shutil.copymode(scratch / "config.json", scratch / file)
        if quantization["quant_method"] == "modelopt":
            (scratch / "hf_quant_config.json").write_text(json.dumps(layouts.legacy_config(quantization), indent=1))
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        folder.rmdir()
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
