"""The GEMMs of a layer done by TransformerEngine, to hold this library against it on the same machine.

    compare with the arms  {name: ours, recipe: nvidia_nvfp4}  and  {name: theirs, recipe: nvidia_nvfp4@te}
    nt.convert(model, "nvidia_nvfp4", backend="te")

The layer keeps the parameters, the state_dict and the schedule of ours; each forward runs ``te.pytorch.Linear`` on the
same Parameter objects under the recipe that ``te_translation`` makes of the layer's plan. Needs a Blackwell GPU and
``pip install nvfp4-train[te]``. Not run by us: no machine of ours has such a GPU.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train import ledger
from nvfp4_train.backend import Backend
from nvfp4_train.integrations.te_translation import VERSION, te_arguments, te_phases
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.quantization import BF16
from nvfp4_train.recipe import Recipe

BACKEND = "te"
_recipes: dict[tuple, object] = {}  # arguments -> NVFP4BlockScaling, shared by all layers


def require() -> None:
    """Raises ValueError, with what to do, where TransformerEngine is not installed or knows no NVFP4."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("backend 'te' needs TransformerEngine: pip install nvfp4-train[te], or leave @te out")
    from transformer_engine.common import recipe

    if not hasattr(recipe, "NVFP4BlockScaling"):
        raise ValueError(f"this TransformerEngine has no NVFP4 recipe: install transformer-engine {VERSION}")


class TransformerEngineLinear(QuantizedLinear):
    """A ``QuantizedLinear`` whose three GEMMs TransformerEngine does.

    Shapes: what TransformerEngine takes: tokens and features in multiples of 16, else it raises. ``.grad`` gets the
    weight's gradient; a ``main_grad`` is refused. What the ledger counts under ``te`` is what TransformerEngine was
    asked for, not what was seen to run.

    Raises:
        ValueError: no TransformerEngine; a recipe it cannot express, with the fields; a weight with ``main_grad``.
    """

    def _choose_backend(self) -> None:
        te_phases(self.recipe)
        require()
        self.device_type = self.weight.device.type
        self.backend = Backend(BACKEND, BACKEND)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.weight, "main_grad", None) is not None:
            raise ValueError(f"{self.label}: backend 'te' returns the gradient in .grad, the weight has a main_grad")
        plain_forward = self.plan.fprop_weight == BF16 and not torch.is_grad_enabled()  # an evaluation in BF16
        arguments = None if plain_forward else te_arguments(self.plan)
        if arguments is None:
            self._count(x, ("fprop",))
            y = F.linear(x, self.weight, self.bias)
        else:
            import transformer_engine.pytorch as te

            self._count(x, ("fprop",))
            with te.autocast(enabled=True, recipe=_recipe(arguments)):
                y = self._engine()(x)
        if y.requires_grad:
            needed = {"dgrad": x.requires_grad, "wgrad": self.weight.requires_grad}
            gemms = [name for name, wanted in needed.items() if wanted]
            y.register_hook(lambda _: self._count(x, gemms))
        return y

    def _engine(self):
        """TransformerEngine's layer on our parameters; not a submodule, so that state_dict and names stay ours."""
        import transformer_engine.pytorch as te

        engine = self.__dict__.get("engine")
        if engine is None:
            engine = te.Linear(
                self.in_features, self.out_features, bias=self.bias is not None, params_dtype=self.weight.dtype,
                device="meta",
            )  # fmt: skip
            self.__dict__["engine"] = engine
        engine.train(self.training)
        if engine.weight is not self.weight:
            engine.weight = self.weight
        if self.bias is not None and engine.bias is not self.bias:
            engine.bias = self.bias
        return engine

    def _count(self, x: Tensor, gemms) -> None:
        flops = 2 * x.numel() * self.out_features
        operands = {"fprop": self.plan[:2], "dgrad": self.plan[2:4], "wgrad": self.plan[4:]}
        for gemm in gemms:
            ledger.count_matmul(self.site.shape[0], gemm, *operands[gemm], BACKEND, flops)

    def __getstate__(self):
        return {key: value for key, value in super().__getstate__().items() if key != "engine"}


def _recipe(arguments: dict) -> object:
    from transformer_engine.common.recipe import NVFP4BlockScaling

    key = tuple(arguments.items())
    if key not in _recipes:
        _recipes[key] = NVFP4BlockScaling(**arguments)
    return _recipes[key]


def split(recipe: str | dict | Recipe) -> tuple[str | dict | Recipe, str | None]:
    """(recipe, backend) of a recipe that may be written ``NAME@te``; ValueError for another word behind the @."""
    if not isinstance(recipe, str) or "@" not in recipe:
        return recipe, None
    name, _, backend = recipe.rpartition("@")
    if backend != BACKEND:
        raise ValueError(f"{recipe!r}: behind the @ stands the backend, and only {BACKEND!r} is known")
    return name, backend
