"""Small models for tests of conversion, and what to ask of them."""

import torch
from torch import nn

import nvfp4_train as nt
from nvfp4_train.linear import QuantizedLinear

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """embedding, blocks, a head tied to the embedding"""

    def __init__(self, blocks=4, size=16, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(blocks))
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model(**options):
    torch.manual_seed(0)
    return Model(**options)


def recipe(**changes):
    return nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}} | changes


def reasons(report) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in report.skipped}


def quantized(module) -> list[str]:
    return [name for name, inner in module.named_modules() if isinstance(inner, QuantizedLinear)]
