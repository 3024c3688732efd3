"""What forward keeps for backward, however it is put together."""

from typing import Any

from torch import Tensor

from nvfp4_train.quantization import QuantizedTensor


def save(ctx: Any, *items: QuantizedTensor | Tensor | None) -> None:
    """Tensors go through ``save_for_backward`` (hooks and checkpointing see them there), the rest stays plain."""
    ctx.kept = []
    tensors = []
    for item in items:
        parts = tuple(item) if isinstance(item, QuantizedTensor) else (item,)
        ctx.kept.append([None if isinstance(part, Tensor) else part for part in parts])
        tensors += [part if isinstance(part, Tensor) else None for part in parts]
    ctx.save_for_backward(*tensors)


def restore(ctx: Any) -> list[Any]:
    """The items that were saved."""
    tensors = list(ctx.saved_tensors)
    items: list[Any] = []
    for plain in ctx.kept:
        parts = [value if saved is None else saved for value, saved in zip(plain, tensors, strict=False)]
        tensors = tensors[len(plain) :]
        items.append(QuantizedTensor(*parts) if len(parts) > 1 else parts[0])
    return items
