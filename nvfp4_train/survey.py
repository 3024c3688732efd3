"""What is in a model: its matmul weights, its blocks, and why a layer cannot be converted. Reads, changes nothing."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from nvfp4_train.experts import is_experts, why_not_experts, why_not_recipe
from nvfp4_train.quantization import INPUT_TYPES
from nvfp4_train.recipe import Recipe
from nvfp4_train.recipe_errors import did_you_mean
from nvfp4_train.selection import Blocks, KeepBF16
from nvfp4_train.swapping import Quantized
from nvfp4_train.transposed import is_conv1d, why_not_conv1d

# What a subclass of nn.Linear may define and be replaced all the same: how it is built and told, and what Python itself
# (3.10 to 3.14), abc and typing put into every class. A QuantizedLinear holds the instance's attributes, not its class.
_HARMLESS = frozenset(
    "__init__ reset_parameters extra_repr __repr__ __str__ __constants__ "
    "__doc__ __module__ __qualname__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__conditional_annotations__ __firstlineno__ __static_attributes__ __dict__ __weakref__ __slots__ "
    "__abstractmethods__ _abc_impl __orig_bases__ __parameters__ __type_params__ __init_subclass__ "
    "__class_getitem__ _is_protocol".split()
)


class ConversionError(ValueError):
    """A model that cannot be converted as the recipe says; the model is left as it was."""


class Skipped(NamedTuple):
    """A layer left as it was: its qualified name, its class and the reason."""

    name: str
    kind: str
    reason: str


class Place(NamedTuple):
    """Where a module hangs: ``parent`` holds it under ``attribute``."""

    parent: nn.Module
    attribute: str


class Survey:
    """One walk over a model. A module that hangs in several places is one module with several names."""

    def __init__(self, model: nn.Module):
        self.modules: dict[str, nn.Module] = {}  # each module once, by its first name
        self.names: dict[nn.Module, list[str]] = {}
        self.places: dict[nn.Module, list[Place]] = {}
        self.parents: dict[str, nn.Module] = {"": model}
        for name, module in model.named_modules(remove_duplicate=False):
            self.parents[name] = module
            parent_name, _, attribute = name.rpartition(".")
            if module not in self.names:
                self.modules[name] = module
            self.names.setdefault(module, []).append(name)
            if name:
                self.places.setdefault(module, []).append(Place(self.parents[parent_name], attribute))

    def convertible(self) -> dict[str, nn.Module]:
        """The modules of a kind that can be converted: nn.Linear, experts and Conv1D of transformers."""
        return {name: module for name, module in self.modules.items() if is_convertible(module)}

    def why_not(self, module: nn.Module, recipe: Recipe) -> str | None:
        """Why a module of a convertible kind must stay as it is under ``recipe``, or None."""
        if is_experts(module):
            return why_not_experts(module) or why_not_recipe(recipe)
        if not isinstance(module, nn.Linear):
            return why_not_conv1d(module)
        if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
            return "its forward is not nn.Linear's"
        if module.__dict__.get("_compiled_call_impl") is not None:
            return "it is compiled, and would go on running the compiled code: convert first, then compile"
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed anew each time (parametrized), not a parameter of its own"
        if "bias" not in module._parameters:
            return "its bias is computed anew each time (parametrized), not a parameter of its own"
        if isinstance(weight, nn.UninitializedParameter):
            return "its shape is not known yet (lazy): run the model once, then convert"
        if weight.dtype not in INPUT_TYPES:
            return f"its weight is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
        if any(isinstance(place.parent, nn.MultiheadAttention) for place in self.places.get(module, ())):
            return "nn.MultiheadAttention reads its weight and never calls it"
        added = _added(type(module))
        if added:
            what = "methods" if any(callable(getattr(type(module), name)) for name in added) else "attributes"
            return f"a subclass of nn.Linear with {what} of its own: {', '.join(added)}"
        return None

    def other_weights(self) -> list[tuple[Skipped, nn.Parameter]]:
        """Weights that a matmul may read, outside the convertible modules: they stay as they are, and are told."""
        found = []
        for name, module in self.modules.items():
            if is_convertible(module) or isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd):
                continue
            kind = type(module).__name__
            for key, parameter in module._parameters.items():
                if parameter is None or isinstance(parameter, nn.UninitializedParameter):
                    continue
                label = ".".join(filter(None, (name, key)))
                if parameter.dim() == 3 and parameter.shape[0] > 1:
                    reason = "a 3-D parameter of a module that does not follow transformers' experts interface"
                    found.append((Skipped(label, kind, reason), parameter))
                elif parameter.dim() == 2 and min(parameter.shape) > 1:
                    found.append((Skipped(label, kind, "a 2-D parameter outside any nn.Linear"), parameter))
        return found

    def kept_by_globs(self, keep: KeepBF16) -> dict[nn.Module, str]:
        """module -> why it is kept, for every module a glob matches and all modules inside those.

        Raises ConversionError, with the nearest names, for globs of ``keep.modules`` that match no module.
        """
        kept: dict[nn.Module, str] = {}
        missed = []
        for glob in (*keep.modules, *keep.if_present):
            matched = [module for name, module in self.parents.items() if name and fnmatchcase(name, glob)]
            if not matched and glob in keep.modules:
                missed.append(f"{glob!r} matches no module{self._near(glob)}")
            for module in matched:
                for inner in module.modules():
                    kept.setdefault(inner, f"keep_bf16: {glob!r}")
        if missed:
            raise ConversionError(f"keep_bf16.modules: {'; '.join(missed)}")
        return kept

    def matched_only_others(self, keep: KeepBF16) -> list[Skipped]:
        """Modules that a glob of ``keep.modules`` names and that are never quantized anyway."""
        found = []
        for glob in keep.modules:
            matched = {name: module for name, module in self.modules.items() if name and fnmatchcase(name, glob)}
            if not any(is_convertible(inner) for module in matched.values() for inner in module.modules()):
                reason = f"keep_bf16: {glob!r}, never quantized anyway"
                found += [Skipped(name, type(module).__name__, reason) for name, module in matched.items()]
        return found

    def _near(self, glob: str) -> str:
        names = [name for name in self.parents if name][:5000]  # spelling takes long on very large models
        return did_you_mean(glob, names) or did_you_mean(glob, {name.rpartition(".")[2] for name in names})

    def blocks(self) -> tuple[str, list[nn.Module]]:
        """(name, blocks) of the model's stack of blocks: the longest outermost list of modules that hold linears.

        An nn.ModuleList counts if each of its children holds a linear (or experts, or a Conv1D); an nn.Sequential or
        nn.ModuleDict only if its children are of one class as well. Raises ConversionError where there is none, or two
        of one length.
        """
        stacks: dict[str, list[nn.Module]] = {}
        for name, module in self.modules.items():
            inside = any(name.startswith(f"{outer}.") or not outer for outer in stacks)
            if not inside and _is_stack(module):
                stacks[name] = list(module.children())
        if not stacks:
            raise ConversionError(
                "keep_bf16.blocks: no blocks found: the model has no nn.ModuleList whose children hold nn.Linear "
                "layers. Name the layers to keep with keep_bf16.modules"
            )
        longest = max(len(children) for children in stacks.values())
        found = [name for name, children in stacks.items() if len(children) == longest]
        if len(found) > 1:
            raise ConversionError(
                f"keep_bf16.blocks: which blocks? {' and '.join(found)} have {longest} each. "
                "Name the layers to keep with keep_bf16.modules"
            )
        return found[0], stacks[found[0]]

    def kept_by_place(self, blocks: Blocks) -> dict[nn.Module, str]:
        """linear -> why, for the linears of the blocks that ``blocks`` keeps. ConversionError if no block is left."""
        name, children = self.blocks()
        count = len(children)
        first, last = blocks.kept(count)
        if first + last >= count:
            raise ConversionError(
                f"keep_bf16.blocks ({blocks}) keeps {first + last} blocks, and {name or 'the model'} has {count}: "
                "no block would be converted"
            )
        kept = {}
        for index, child in enumerate(children):
            if index < first or index >= count - last:
                for inner in child.modules():
                    kept[inner] = f"keep_bf16.blocks ({blocks}): block {index} of the {count} in {name or 'the model'}"
        return kept


def is_convertible(module: nn.Module) -> bool:
    """Whether a recipe may speak of the module at all."""
    return isinstance(module, nn.Linear | Quantized) or is_experts(module) or is_conv1d(module)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The weights of a convertible module that products read."""
    if isinstance(module, Quantized):
        return list(module.weights().values())
    if is_experts(module):
        return [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
    weight = module._parameters.get("weight")
    return [] if weight is None or isinstance(weight, nn.UninitializedParameter) else [weight]


def _added(kind: type[nn.Linear]) -> list[str]:
    """Names that ``kind`` and its bases (mixins too) define beyond nn.Linear's own classes: what a conversion loses."""
    bases = [base for base in kind.__mro__ if base not in nn.Linear.__mro__]
    return list(dict.fromkeys(name for base in bases for name in vars(base) if name not in _HARMLESS | {"forward"}))


def _is_stack(module: nn.Module) -> bool:
    children = list(module.children())
    if not children or not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    if not isinstance(module, nn.ModuleList) and len({type(child) for child in children}) > 1:
        return False
    return all(any(is_convertible(inner) for inner in child.modules()) for child in children)
