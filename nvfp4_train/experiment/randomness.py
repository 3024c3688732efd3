"""Who draws from which random numbers, so that one arm's quantizer cannot disturb what the arms must share.

| what                 | generator                                             | depends on       |
|----------------------|-------------------------------------------------------|------------------|
| initial weights      | its own (`model.py`)                                  | seed             |
| order of the batches | its own, a pure function of (seed, step) (`data.py`)  | seed             |
| dropout              | the `dropout` stream kept here, begun anew for each   | seed             |
|                      | microbatch: a pure function of (seed, step, part)     |                  |
| quantizer's draws    | torch's default generator of the device, seeded anew  | arm and seed     |
|                      | for each microbatch from (arm, seed, step, part)      |                  |

So a microbatch has the same numbers on whichever rank, and after whatever resume, it is worked on.

Layers take their seeds from torch's default generator, and so does dropout: without the swap below an arm that
rounds stochastically would see other dropout masks than its control.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nvfp4_train.experiment.errors import ExperimentError


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from a purpose and what it depends on; equal on every machine and Python."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def get_state(device: torch.device) -> Tensor:
    """The state of the device's default generator (a CPU tensor; on CUDA this does not wait for the GPU)."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def isolated(device: torch.device, *parts: object) -> Iterator[None]:
    """Default generators seeded from `parts` inside, and exactly as before afterwards."""
    cpu, other = torch.get_rng_state(), get_state(device)
    torch.manual_seed(derive_seed(*parts))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        set_state(device, other)


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class DropoutStream(TorchFunctionMode):
    """Inside this mode every dropout draws from a stream of its own, which `state` saves and restores.

    Seen are dropout functions and the dropout of `scaled_dot_product_attention`, in eager execution.
    """

    def __init__(self, device: torch.device, seed: int):
        super().__init__()
        self.device = device
        self.restart(seed)
        self._inside = False

    def restart(self, *parts: object) -> None:
        """Begins the stream that belongs to `parts`: the next draws depend on nothing before."""
        self._parts, self._state = parts, None

    @property
    def state(self) -> Tensor:
        if self._state is None:  # made when the first dropout asks, since most models have none
            with isolated(self.device, "dropout", *self._parts):
                self._state = get_state(self.device)
        return self._state

    @state.setter
    def state(self, value: Tensor) -> None:
        self._state = value

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if self._inside or not (func in _DROPOUTS or _attention_dropout(func, args, kwargs)):
            return func(*args, **kwargs)
        outer = get_state(self.device)
        set_state(self.device, self.state)
        self._inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False
            self.state = get_state(self.device)
            set_state(self.device, outer)


def _attention_dropout(func: Any, args: tuple, kwargs: dict) -> bool:
    if func is not F.scaled_dot_product_attention:
        return False
    return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0.0


def uses_dropout(model: nn.Module) -> bool:
    """Whether any module or config key of a transformers model asks for dropout."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    settings = model.config.to_dict() if hasattr(model, "config") else {}
    return any("drop" in k and isinstance(v, int | float) and v > 0 for k, v in settings.items())


def refuse_dropout(model: nn.Module, setting: str) -> None:
    """A compiled or recorded step has no place where dropout could change over to its own stream."""
    if uses_dropout(model):
        raise ExperimentError(
            f"training.{setting}: true cannot be combined with a model that uses dropout (the arms would not get the "
            f"same masks): set the model's dropout keys to 0, or {setting}: false"
        )
