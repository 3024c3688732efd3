"""A small model, its microbatches and its training on one process: what the layouts of several ranks are held to."""

import torch
from torch import nn

import nvfp4_train as nt

torch.set_num_threads(1)
TOKENS, STEPS = 48, 5


class Block(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, size=32, hidden=64, blocks=2, device=None):
        super().__init__()
        with torch.device(device or "cpu"):
            self.blocks = nn.ModuleList(Block(size, hidden) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def recipe(**changes):
    return nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}} | changes


@torch.no_grad()
def fill(model):
    """Weights that do not depend on who makes them."""
    for name, parameter in sorted(model.named_parameters()):
        draws = torch.Generator().manual_seed(sum(name.encode()))
        values = torch.randn(parameter.shape, generator=draws) * (0.2 if parameter.ndim > 1 else 1.0)
        parameter.copy_(values.to(parameter.dtype))


def make(changes=None, **sizes):
    model = Model(**sizes)
    fill(model)
    nt.convert(model, recipe(**(changes or {})))
    return model


def microbatch(step, part, size=32):
    return torch.randn(TOKENS, size, generator=torch.Generator().manual_seed(100 * step + part))


def seed_microbatch(step, part):
    """Each microbatch has draws of its own, whoever works on it."""
    torch.manual_seed(1000 + 100 * step + part)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, x):
    return (model(x) - x.flip(-1)).square().mean()


def train_alone(model, parts, steps=STEPS, size=32):
    """Losses of each step; ``parts`` microbatches a step."""
    optimizer, losses = optimizer_of(model), []
    for step in range(steps):
        total = 0.0
        for part in range(parts):
            seed_microbatch(step, part)
            loss = loss_of(model, microbatch(step, part, size))
            (loss / parts).backward()
            total += loss.item()
        losses.append(total / parts)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
