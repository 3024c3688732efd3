"""What a recipe costs a model: bytes of the training state and of saved activations, FLOPs by precision.

Counted on the model itself, built without memory (on the meta device) and run forward once: which layers are converted
comes from ``convert``, which inputs are shared from the run. Nothing here is measured in time.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from nvfp4_train.conversion import convert, converted_layers
from nvfp4_train.experts import is_experts
from nvfp4_train.explaining.operands import bits_of
from nvfp4_train.linear import transposes_exactly
from nvfp4_train.operands import BF16, OperandSpec
from nvfp4_train.recipe import GEMMS, Recipe
from nvfp4_train.survey import Survey, weights_of
from nvfp4_train.transposed import is_conv1d

BF16_BYTES = 2.0
FLOAT32_BYTES = 4.0
ADAM_BYTES = 2 * FLOAT32_BYTES  # two float32 moments
GEMMS_OF_A_LAYER = 3


@dataclass(frozen=True)
class Layer:
    """One product with a weight: its size, its rows for one sequence, and the number of the tensor it reads."""

    name: str
    inputs: int
    outputs: int
    tokens: int
    source: int  # layers that read one and the same tensor share this number


def survey_model(config: Any, tokens: int) -> tuple[nn.Module, list[Layer]]:
    """The causal language model of a transformers config on the meta device, and its products with weights as they run.

    ``tokens``: the length of the one sequence that is run.
    Raises ValueError for an architecture that cannot be built or run without memory.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        layers = _run(model, tokens)
    except Exception as error:  # transformers has no common error for a config that cannot be built
        kind = getattr(config, "model_type", "this model")
        raise ValueError(f"{kind} cannot be built and run on the meta device: {' '.join(str(error).split())}") from None
    return model, layers


def _run(model: nn.Module, tokens: int) -> list[Layer]:
    names = {module: name for name, module in Survey(model).convertible().items()}
    layers: list[Layer] = []
    seen: list[torch.Tensor] = []  # kept alive, so that no two inputs have one id

    def note(module: nn.Module, arguments: tuple) -> None:
        x = arguments[0]
        source = next((number for number, other in enumerate(seen) if other is x), len(seen))
        if source == len(seen):
            seen.append(x)
        if not is_experts(module):
            inputs, outputs = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
            layers.append(Layer(names[module], inputs, outputs, x.shape[:-1].numel(), source))
            return
        rows, hidden = arguments[1].numel(), x.shape[-1]  # every token once for each expert that it is sent to
        for weight in weights_of(module):
            other = weight[0].numel() // hidden
            first = len(layers) == 0 or layers[-1].name != names[module]
            inputs, outputs = (hidden, other) if first else (other, hidden)  # up (and gate), then down
            seen.append(weight)  # rows are gathered for the experts: no other layer reads them
            layers.append(Layer(names[module], inputs, outputs, rows, len(seen) - 1))

    hooks = [module.register_forward_pre_hook(note) for module in names]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def state_bytes(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Bytes a parameter of a converted weight takes in training, by what holds them.

    ``bf16``: mixed precision as it is usual (BF16 weight, float32 gradient, master and Adam). ``recipe``: the same,
    the BF16 weight replaced by the quantized operands of Fprop and Dgrad that a machine with such GEMMs has to hold.
    ``here``: this library's emulation, which quantizes from the float32 weight and holds no other copy.
    """
    rest = {"gradient": FLOAT32_BYTES, "master": FLOAT32_BYTES, "optimizer": ADAM_BYTES}
    held = sum(bits_of(spec) / 8 for spec in _held_weights(recipe))
    return {
        "bf16": {"weight": BF16_BYTES, **rest},
        "recipe": {"weight": held, **rest},
        "here": {"weight": 0.0, **rest},
    }


def _held_weights(recipe: Recipe) -> list[OperandSpec]:
    """One form where the other is the same, or is made from it when it is needed: from BF16, or requantized."""
    fprop, dgrad = recipe.fprop.weight, recipe.dgrad.weight
    if BF16 in (fprop.format, dgrad.format):
        return [fprop if fprop.format == BF16 else dgrad]
    if dgrad.requantize or transposes_exactly(recipe.plan()):
        return [fprop]
    return [fprop, dgrad]


def flops_by_format(recipe: Recipe) -> dict[str, dict[str, Fraction]]:
    """For each GEMM the share of training that it spends in each pair of formats, by the schedule's fractions.

    A phase that waits for a measured condition cannot be foreseen and is not counted.
    """
    starts = [*recipe.starts, 1.0]
    shares: dict[str, dict[str, Fraction]] = {gemm: {} for gemm in GEMMS}
    for start, end in zip(starts, starts[1:], strict=False):
        for gemm, spec in recipe.gemms(start).items():
            name = pair_name(list(spec.operands.values()))
            part = Fraction(str(end)) - Fraction(str(start))
            shares[gemm][name] = shares[gemm].get(name, Fraction(0)) + part
    return shares


def pair_name(operands: list[OperandSpec]) -> str:
    """``nvfp4``, or ``fp8_e5m2 x fp8_e4m3`` where the two operands of a GEMM differ."""
    return " x ".join(dict.fromkeys(spec.format for spec in operands))


def model_costs(recipe: Recipe, config: Any, tokens: int) -> dict[str, Any]:
    """What ``recipe`` costs on the model of ``config``, for one sequence of ``tokens`` tokens.

    -> parameters (all, converted), bytes of the training state (bf16, recipe, here), bytes of the activations that the
    linear layers save for backward (bf16, recipe), training FLOPs a token by precision. Raises ValueError
    (ConversionError among them) where the recipe cannot be put on the model.
    """
    model, layers = survey_model(config, tokens)
    parameters = {id(p): p.numel() for p in model.parameters()}
    report = convert(model, recipe)
    converted = set(report.converted)
    modules = converted_layers(model).values()
    quantized = {id(weight): weight.numel() for module in modules for weight in weights_of(module)}
    total, inside = sum(parameters.values()), sum(quantized.values())
    per = {who: sum(parts.values()) for who, parts in state_bytes(recipe).items()}
    plain = per["bf16"]
    attention = _attention_flops(config, tokens)
    gemms = _gemm_flops(recipe, layers, converted, tokens)
    return {
        "model_type": getattr(config, "model_type", "unknown"),
        "tokens": tokens,
        "parameters": total,
        "converted_parameters": inside,
        "converted_layers": len(converted),
        "left_in_bf16": sorted({skipped.name for skipped in report.skipped}),
        "state_bytes": {
            "bf16": total * plain,
            "recipe": inside * per["recipe"] + (total - inside) * plain,
            "here": total * per["here"],
        },
        "saved_activation_bytes": _saved(recipe, layers, converted),
        "flops_per_token": gemms | ({"attention (bf16)": attention} if attention else {}),
    }


def _saved(recipe: Recipe, layers: list[Layer], converted: set[str]) -> dict[str, float]:
    """Bytes the linear layers keep of their inputs. BF16 keeps a tensor once for all layers that read it; a quantized
    layer keeps a packed copy of its own."""
    plain: dict[int, float] = {}
    kept_plain: dict[int, float] = {}
    packed = 0.0
    bits = bits_of(recipe.wgrad.input)
    for layer in layers:
        elements = layer.tokens * layer.inputs
        plain[layer.source] = BF16_BYTES * elements
        if layer.name in converted and recipe.wgrad.quantized:
            packed += elements * bits / 8
        else:
            kept_plain[layer.source] = BF16_BYTES * elements
    return {"bf16": sum(plain.values()), "recipe": packed + sum(kept_plain.values())}


def _gemm_flops(recipe: Recipe, layers: list[Layer], converted: set[str], tokens: int) -> dict[str, float]:
    found: dict[str, float] = {}
    shares = flops_by_format(recipe)
    for layer in layers:
        flops = 2.0 * layer.inputs * layer.outputs * layer.tokens / tokens  # of one GEMM, a token
        if layer.name not in converted:
            found[BF16] = found.get(BF16, 0.0) + GEMMS_OF_A_LAYER * flops
            continue
        for parts in shares.values():
            for name, share in parts.items():
                found[name] = found.get(name, 0.0) + flops * float(share)
    return found


def _attention_flops(config: Any, tokens: int) -> float:
    """Training FLOPs a token of causal scores and values, forward and backward: half of the square. 0 where the config
    does not say how many heads there are (an attention-free model)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, blocks = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    if not heads or not blocks:
        return 0.0
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return GEMMS_OF_A_LAYER * 2 * 2.0 * width * (tokens / 2) * blocks
