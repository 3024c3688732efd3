"""What some recipes remember from step to step: amax histories (fp8_delayed) and norms of channels (TetraJet-v2).

The tensors are non-persistent buffers of the layer: they move with it, and its ``state_dict`` stays that of
``nn.Linear``. They are part of a training's state all the same: ``quantizer_state`` and ``load_quantizer_state``
save and restore them beside model and optimizer. A step begins when ``set_progress`` says so, which a recipe that
remembers therefore needs: without it a layer refuses to run.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_kernels.scheme import Scheme, Split
from nvfp4_train.operators import operator, shapes_of
from nvfp4_train.recipe import Recipe

PREFIX = "quantizer_"
NORMS, CHANNELS = f"{PREFIX}channel_norms", f"{PREFIX}channels"


def remembered(recipe: Recipe) -> str | None:
    """What layers keep from step to step for a recipe, in words; None if nothing."""
    schemes = [Scheme.parse(text) for text in recipe.operand_texts if text != "bf16"]
    parts = {
        "amaxes of the steps before": any(scheme.history for scheme in schemes),
        "norms of channels": any(scheme.split is not None and scheme.split.observe is not None for scheme in schemes),
        "moves of each weight": recipe.oscillation_reset is not None,
    }
    return ", ".join(name for name, kept in parts.items() if kept) or None


def prepare(layer: nn.Module) -> None:
    """Gives ``layer``, of one weight, the buffers that its recipe needs at any time of training."""
    for name, text in layer.recipe.operands_by_name:
        scheme = None if text == "bf16" else Scheme.parse(text)
        if scheme is None:
            continue
        if scheme.history:
            _buffer(layer, f"{PREFIX}{name}", scheme.history + 1, torch.float32)
        if scheme.split is not None and scheme.split.observe is not None:
            _buffer(layer, NORMS, layer.in_features, torch.float32)
            _buffer(layer, CHANNELS, channel_count(layer.in_features, scheme.split), torch.int64)


def _buffer(layer: nn.Module, name: str, length: int, dtype: torch.dtype) -> None:
    if name not in layer._buffers:
        layer.__dict__["_buffers"] = dict(layer._buffers)  # from_linear shares the dict with the layer it replaces
        layer.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
        layer.register_buffer(name, torch.zeros(length, dtype=dtype, device=layer.weight.device), persistent=False)


def begin_step(layer: nn.Module, step: int) -> None:
    """What lies between two steps: histories move on by one, and the window that chooses channels may have closed."""
    before = layer.__dict__.get("quantizer_step")
    if before == step:
        return
    layer.quantizer_step = step
    for name, buffer in layer._buffers.items():
        if not name.startswith(PREFIX) or name in (NORMS, CHANNELS) or before is None:
            continue
        buffer.copy_(torch.cat((buffer.new_zeros(1), buffer[:-1])))
    split = observed_split(layer.plan)
    if split is not None and before is not None and before <= split.observe[1] < step:
        chosen = layer._buffers[NORMS].topk(layer._buffers[CHANNELS].numel()).indices
        layer._buffers[CHANNELS].copy_(chosen.sort().values)


def observed_split(plan: tuple[str, ...]) -> Split | None:
    """The split whose channels are chosen in a window of steps, if the plan has one."""
    for text in plan:
        split = None if text == "bf16" else Scheme.parse(text).split
        if split is not None and split.observe is not None:
            return split
    return None


def stage(layer: nn.Module) -> Hashable:
    """What decides, beside the numbers, what a call of the layer runs: its plan, and whether channels are apart yet."""
    split, step = observed_split(layer.plan), layer.__dict__.get("quantizer_step")
    if split is None or step is None:
        return layer.plan, None
    return layer.plan, (step >= split.observe[0]) + (step > split.observe[1])


def forget(layer: nn.Module) -> None:
    """Back to how the layer was before any step."""
    for name, buffer in layer._buffers.items():
        if name.startswith(PREFIX):
            buffer.zero_()
    for key in ("quantizer_step", "reached", "oscillation", "oscillation_step"):
        layer.__dict__.pop(key, None)


def step_of(layer: nn.Module) -> int:
    """The step that set_progress began. ValueError if it never did."""
    step = layer.__dict__.get("quantizer_step")
    if step is None:
        raise ValueError(
            f"{layer.label}: recipe {layer.recipe.name} remembers earlier steps: call "
            "nvfp4_train.set_progress(model, step, total_steps) before each step of training"
        )
    return step


def delayed_amax_of(history: Tensor, x: Tensor) -> Tensor:
    """float32 scalar: the amax that rule ``delayed`` scales ``x`` by; ``x``'s own is entered for the steps to come."""
    return _delayed_amax_op(x, history)


@operator("delayed_amax(Tensor x, Tensor(history!) history) -> Tensor")
def _delayed_amax_op(x: Tensor, history: Tensor) -> Tensor:
    """The largest of ``history[1:]``, the steps before this one; of ``x`` where they saw nothing. NaN for NaN or
    Inf."""
    current = x.detach().abs().amax().to(torch.float32) if x.numel() else history.new_zeros(())
    current = torch.where(current.isfinite(), current, torch.nan)
    history[0] = torch.where(current.isnan(), history[0], torch.maximum(history[0], current))
    earlier = history[1:].max()
    return torch.where(current.isnan() | (earlier == 0), current, earlier)


@shapes_of(_delayed_amax_op)
def _(x, history):
    return history.new_empty(())


def channel_count(features: int, split: Split) -> int:
    """How many channels are apart: the fraction, rounded, at least one."""
    return max(1, round(split.fraction * features))


def hot_channels(layer: nn.Module | None, split: Split, x: Tensor) -> Tensor | None:
    """int64 indices of the channels (columns of ``x [tokens, features]``) apart, ascending; None while none are."""
    if split.observe is None:
        norms = torch.linalg.vector_norm(x.detach(), dim=0, dtype=torch.float32)
        return norms.topk(channel_count(x.shape[1], split)).indices.sort().values
    first, last = split.observe
    step = step_of(layer)
    if step > last:
        return layer._buffers[CHANNELS]
    if step >= first and torch.is_grad_enabled():
        _observe_op(x, layer._buffers[NORMS])
    return None


@operator("observe_channels(Tensor x, Tensor(norms!) norms) -> ()")
def _observe_op(x: Tensor, norms: Tensor) -> None:
    norms += torch.linalg.vector_norm(x.detach(), dim=0, dtype=torch.float32)


@shapes_of(_observe_op)
def _(x, norms):
    return None


def quantizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the converted layers of ``model`` remember, by layer name: for a checkpoint, beside model and optimizer.

    Layers that remember nothing are left out; most recipes give an empty dict.
    """
    state = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "recipe") or not hasattr(layer, "plan"):
            continue
        kept: dict[str, Any] = {key: value.clone() for key, value in layer._buffers.items() if key.startswith(PREFIX)}
        if kept and layer.__dict__.get("quantizer_step") is not None:
            kept["quantizer_step"] = layer.quantizer_step
        if layer.__dict__.get("reached"):
            kept["reached"] = sorted(layer.reached)
        if layer.__dict__.get("oscillation") is not None:
            kept["oscillation"] = layer.oscillation.state()
        if kept:
            state[name] = kept
    return state


def load_quantizer_state(model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Restores what ``quantizer_state`` gave, into a model converted with the same recipe. ValueError if it is
    another."""
    from nvfp4_train.oscillation import Window

    layers = dict(model.named_modules())
    for name, kept in state.items():
        layer = layers.get(name)
        if layer is None or not hasattr(layer, "recipe"):
            raise ValueError(f"the state has a layer {name!r} that is no converted layer of this model")
        for key, value in kept.items():
            if isinstance(value, Tensor):
                if key not in layer._buffers or layer._buffers[key].shape != value.shape:
                    raise ValueError(f"{name}: {key} of the state does not fit recipe {layer.recipe.name}")
                layer._buffers[key].copy_(value)
            elif key == "oscillation":
                layer.oscillation = Window.of(value)
            else:
                setattr(layer, key, frozenset(value) if key == "reached" else value)
