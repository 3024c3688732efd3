"""torchtitan (0.3): a model-config converter, and a Trainer whose loop tells the recipe of its steps.

    from nvfp4_train.integrations.torchtitan import NVFP4Converter, ScheduledTrainer
    spec = model_registry("8B", converters=[NVFP4Converter.Config(recipe="nvidia_nvfp4")])

torchtitan builds a model from a tree of configs; a converter swaps nodes of the tree before anything is built, so that
meta-device initialisation, activation checkpointing, compilation and FSDP find a finished model. The nodes to swap are
those ``convert`` would convert in a model of the same names: globs, blocks and all reasons are the same.

Verified on one process; FSDP2 works as for any module. Tensor parallelism by torchtitan's own layouts and its grouped
experts are not covered: experts stay in BF16 and are listed.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from nvfp4_train.conversion import ConversionReport, convert, converted_layers, set_progress
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.oscillation import after_optimizer_step
from nvfp4_train.recipe import load_recipe
from nvfp4_train.survey import Skipped


class NVFP4Linear(QuantizedLinear, Linear):
    """QuantizedLinear that is a torchtitan Module: built from a Config, initialised by torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: dict = field(default_factory=dict)
        label: str = "linear"
        backend: str | None = None

    def __init__(self, config: Config):
        Linear.__init__(self, config)
        self._set_up(load_recipe(config.recipe), config.label, config.backend)


class NVFP4Converter(QuantizationConverter):
    """Swaps the linear layers that a recipe quantizes. ``report``: what was converted, what was not, why."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str | dict = "nvidia_nvfp4"
        backend: str | None = None

    def __init__(self, config: Config):
        self.config = config
        self.report: ConversionReport | None = None

    def convert(self, model_config):
        """Raises ConversionError and RecipeError (ValueErrors), the tree then being as it was."""
        recipe = load_recipe(self.config.recipe)
        nodes = {fqn: place for fqn, *place in model_config.traverse(Linear.Config)}
        plain = {fqn: node for fqn, (node, *_) in nodes.items() if type(node) is Linear.Config}
        self.report = convert(_skeleton(plain), recipe)
        left = [(fqn, nodes[fqn][0], "a linear layer of a class of its own") for fqn in nodes if fqn not in plain]
        left += [(fqn, node, "grouped experts") for fqn, node, *_ in model_config.traverse(GroupedExperts.Config)]
        self.report.skipped.extend(Skipped(fqn, type(node).__qualname__, reason) for fqn, node, reason in left)
        for fqn in self.report.converted:
            node, parent, key = nodes[fqn]
            swapped = NVFP4Linear.Config(
                in_features=node.in_features, out_features=node.out_features, bias=node.bias,
                param_init=node.param_init, sharding_config=node.sharding_config,
                recipe=recipe.to_dict(), label=fqn, backend=self.config.backend,
            )  # fmt: skip
            if isinstance(parent, list):
                parent[key] = swapped
            else:
                setattr(parent, key, swapped)
        logger.info(str(self.report))
        return model_config


def _skeleton(nodes: dict[str, Linear.Config]) -> nn.Module:
    """A tree of plain modules under the same names, on the meta device; numbered children stand in a ModuleList."""
    root: dict = {}
    for fqn, node in nodes.items():
        *path, last = fqn.split(".")
        place = root
        for part in path:
            place = place.setdefault(part, {})
        place[last] = nn.Linear(node.in_features, node.out_features, node.bias, device=torch.device("meta"))

    def build(tree: dict) -> nn.Module:
        children = {name: build(child) if isinstance(child, dict) else child for name, child in tree.items()}
        module = nn.ModuleList() if all(name.isdigit() for name in children) else nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    return build(root)


class ScheduledTrainer(Trainer):
    """torchtitan's Trainer; before each step the recipe's schedule moves, without a restart; after it, weights that
    oscillate are reset, where the recipe says so (which needs them whole, not sharded by FSDP)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        step, total = self.step - 1, self.config.training.steps  # torchtitan counts from 1
        move_schedule(self.model_parts, step, total)
        result = super().train_step(data_iterator)
        for part in self.model_parts:
            after_optimizer_step(part, step, total)
        return result


def move_schedule(model_parts: list[nn.Module], step: int, total: int) -> bool:
    """``set_progress`` for the parts of a pipeline, of which some may hold no converted layer; whether any switched."""
    switched = [set_progress(part, step, total) for part in model_parts if converted_layers(part)]
    if any(switched):
        logger.info(f"step {step} of {total}: the recipe's schedule switched")
    return any(switched)
