"""A weight quantized once for all microbatches of a step.

    with nt.cached_weights(model):
        for batch in microbatches:
            loss(model(batch)).backward()
    optimizer.step()

Inside, each layer keeps its quantized weight in packed form (0.5 to 0.6 bytes an element, no BF16 copy) and uses it
again for as long as the weight is the same tensor at the same place with the same version: the bits are those of
quantizing anew. Any in-place change that torch counts (``load_state_dict``, ``add_`` under ``no_grad``) invalidates
it, and so does every step of a ``torch.optim.Optimizer``: fused ones (torch 2.13's ``AdamW(fused=True)``) write weights
without counting. A write through ``weight.data`` outside an optimizer is seen by nobody: make it outside. A weight
whose rounding is stochastic is drawn anew at each call and never kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.quantization import BF16, QuantizedTensor, quantize
from nvfp4_train.weight_gather import GatheredWeight, ShardedWeight


class CachedWeight:
    """The quantized forms of one weight: one for each scheme and orientation that a layer's GEMMs read."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._kept: dict[tuple[str, bool], tuple[tuple, QuantizedTensor]] = {}

    def clear(self) -> None:
        self._kept.clear()

    @torch.compiler.disable(reason="a cached weight depends on the weight's version, which a graph does not see")
    def quantized(self, weight: Tensor, scheme: str, transpose: bool, **options: Any) -> QuantizedTensor:
        """What ``quantize`` gives in packed form; a layer decodes it at each use, also after a miss.

        Activation checkpointing that selects operators compares those of forward with those it runs again: the cache is
        out of its sight, so that a miss and a hit look the same.
        """
        # a change of a DTensor moves the version of the parameter, not that of the local tensor in it
        versions = (weight._version, self._layer.weight._version)
        now = (weight.data_ptr(), versions, weight.dtype, tuple(weight.shape), weight.stride(), weight.device)
        then, kept = self._kept.get((scheme, transpose), (None, None))
        if then != now:
            with _disable_current_modes():
                kept = quantize(weight, scheme, transpose=transpose, form="packed", **options)
            self._kept[scheme, transpose] = now, kept
        return kept


def quantized_weight(
    weight: Tensor, scheme: str, cache: CachedWeight | None, *, transpose: bool = False, form: str, **options: Any
) -> QuantizedTensor:
    """``quantize`` of a layer's weight: from the cache, or as FSDP gathered it, where there is such a thing."""
    if isinstance(weight, GatheredWeight):
        return weight.operand(scheme, transpose)
    if isinstance(weight, ShardedWeight):  # before fully_shard, or after a model was unwrapped
        weight = weight.plain
    if cache is None or scheme == BF16 or Scheme.parse(scheme).stochastic:
        return quantize(weight, scheme, transpose=transpose, form=form, **options)
    return cache.quantized(weight, scheme, transpose, **options)


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within it every converted layer of ``model`` quantizes its weight once for each of its versions.

    Not for layers sharded by FSDP, which frees the whole weight between uses; a compiled layer graph-breaks at the
    cache (``fullgraph=True`` refuses it). Raises ValueError for a model with such layers, for recipes that do more with
    a weight than quantize it, and for a model without converted layers.
    """
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "weight_cache")}
    if not layers:
        raise ValueError("the model has no converted layer: call convert(model, recipe) first")
    for name, layer in layers.items():
        if layer.sharded_at_rest:
            raise ValueError(
                f"cached_weights: {name or 'the layer'} is sharded by FSDP, which frees the whole weight after each "
                "use to save memory; keeping its quantized form would undo that: leave cached_weights out"
            )
        if not layer.plan.simple:
            raise ValueError(
                f"cached_weights: {name or 'the layer'} runs recipe {layer.recipe.name}, which does more with a weight "
                "than quantize it: leave cached_weights out"
            )
    before = [(layer, layer.weight_cache) for layer in layers.values()]
    caches = [CachedWeight(layer) for layer, _ in before]

    def forget(*_: Any) -> None:
        for cache in caches:
            cache.clear()

    hook = register_optimizer_step_post_hook(forget)
    try:
        for (layer, _), cache in zip(before, caches, strict=True):
            layer.weight_cache = cache
        yield
    finally:
        hook.remove()
        for layer, cache in before:
            layer.weight_cache = cache
