"""Modules that keep their class and gain quantized products: what experts and transformers' Conv1D have in common.

``nn.Linear`` has a quantized subclass of its own (linear.py). Other modules come in as many classes as there are
models, and their models ask for them by class (initialisation, parallel plans). So the twin of such a module is an
instance of a class made on the spot, ``QuantizedMixtralExperts(QuantizedExperts, MixtralExperts)``.
"""

from functools import cache

import torch
from torch import Tensor, nn

from nvfp4_train import ledger, linear_mechanisms
from nvfp4_train.backend import choose
from nvfp4_train.linear import LinearFunction
from nvfp4_train.recipe import Recipe, load_recipe
from nvfp4_train.sharding import is_sharded


class Quantized(nn.Module):
    """A module whose products run as a recipe says. ``products``: the names of its weights, one ledger row each."""

    products: tuple[str, ...] = ()
    kind = "this module"

    @classmethod
    def of(cls, module: nn.Module, recipe: str | dict | Recipe, label: str, backend: str | None = None) -> "Quantized":
        """The quantized twin of ``module``: shares its Parameter objects, submodules, hooks and mode."""
        layer = nn.Module.__new__(_twin_class(cls, type(module)))
        layer.__dict__ = dict(module.__dict__)
        layer._set_up(load_recipe(recipe), label, backend)
        return layer

    def _set_up(self, recipe: Recipe, label: str, backend: str | None) -> None:
        self.recipe = recipe
        self.plan = recipe.plan(0.0)
        self.label = label
        self.backend_request = backend
        self._name_sites()
        self._choose_backend()
        self.sharded_at_rest = False

    def weights(self) -> dict[str, nn.Parameter]:
        """The weights whose products are quantized, by name."""
        return {key: self._parameters[key] for key in self.products if self._parameters.get(key) is not None}

    def _name_sites(self) -> None:
        one = len(self.weights()) == 1
        self.sites = {key: ledger.site(self.label if one else f"{self.label}.{key}") for key in self.weights()}

    def _device(self) -> torch.device:
        return next(iter(self.weights().values())).device

    def _refuse_sharded(self, *inputs: Tensor) -> None:
        """ValueError where tensor parallelism cut what only a linear layer can be cut in."""
        for name, tensor in (("input", inputs), ("weight", self.parameters(recurse=False))):
            if any(map(is_sharded, tensor)):
                raise ValueError(
                    f"{self.label}: its {name} is a DTensor, and {self.kind} cannot be cut over ranks: leave it out of "
                    "the plan of parallelize_module, and give it plain tensors; or, if fully_shard cut it, call it "
                    "through the module that fully_shard was given"
                )

    def _choose_backend(self) -> None:
        self.device_type = self._device().type
        self.backend = choose(self._device(), self.backend_request, self.recipe.operand_texts)

    def _product(self, x: Tensor, weight: Tensor, main_grad, seed, where: int, dtype: torch.dtype) -> Tensor:
        """``x [M, K] @ weight [N, K].T`` in ``dtype``, its three GEMMs as the plan says."""
        if main_grad is not None and not main_grad.is_contiguous():
            raise ValueError(f"{self.label}: a weight kept as [in, out] cannot gather its gradient in main_grad")
        needs = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
        if not self.plan.simple:  # splits, requantizes, masks or remembers operands
            return linear_mechanisms.run(self, x, weight, main_grad, seed, where, dtype, needs)
        return LinearFunction.apply(
            x, weight, main_grad, seed, where, self.plan, self.backend, dtype, needs, None, not self.sharded_at_rest
        )

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in self.products and value is not None and "backend" in self.__dict__:
            # as in QuantizedLinear: the way FSDP takes with the shard, and with the whole weight before each use
            self.sharded_at_rest = self.sharded_at_rest or is_sharded(value)
            if value.device.type != self.device_type:
                self._choose_backend()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._choose_backend()
        return self

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "sites"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._name_sites()  # sites are numbered anew in each process

    def __reduce_ex__(self, protocol):
        base, kind = getattr(type(self), "_made_of", (type(self), None))
        return _blank, (base, kind), self.__getstate__()

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe.name}, backend={self.backend}")))


@cache
def _twin_class(base: type[Quantized], kind: type[nn.Module]) -> type[Quantized]:
    return type(f"Quantized{kind.__name__}", (base, kind), {"__module__": kind.__module__, "_made_of": (base, kind)})


def _blank(base: type[Quantized], kind: type[nn.Module] | None) -> Quantized:
    """An instance without attributes, for copy and pickle: a class made on the spot has no importable name."""
    return nn.Module.__new__(base if kind is None else _twin_class(base, kind))
