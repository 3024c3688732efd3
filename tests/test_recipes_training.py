"""Every shipped recipe converts a model and trains it for 100 steps: no NaN, and something is learned."""

import pytest
import torch
from tiny_models import quantized
from torch import nn
from torch.nn.functional import cross_entropy

import nvfp4_train as nt
from nvfp4_train.recipe import recipe_names

STEPS = 100
EARLY = "tetrajet2 with what comes late brought forward"
torch.set_num_threads(1)


class Small(nn.Module):
    """One quantized layer between an embedding, which Dgrad has to reach, and a head."""

    def __init__(self, size=32, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList([nn.Linear(size, size)])
        self.lm_head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + self.layers[0](x).relu())


def batches():
    """Token sequences whose every second token follows from the one before it."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 32, (2, 9), generator=generator)
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 3 + 1) % 32
        yield tokens


@pytest.mark.parametrize("name", [*recipe_names(), EARLY])
def test_trains(name):
    torch.manual_seed(0)
    model = Small()
    recipe = nt.load_recipe("tetrajet2" if name == EARLY else name)
    if name == EARLY:
        as_dict = recipe.to_dict() | {"oscillation_reset": {"every": 20, "window": 5, "ratio": 8}}
        as_dict["fprop"]["input"]["split"]["observe"] = [5, 10]
        recipe = nt.load_recipe(as_dict)
    if recipe.keep_bf16.blocks is not None:  # of one block nothing would be left
        recipe = nt.load_recipe(recipe.to_dict() | {"keep_bf16": {"if_present": ["lm_head"]}})
    nt.convert(model, recipe)
    assert quantized(model) == ([] if name == "bf16" else ["layers.0"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, tokens in enumerate(batches()):
        nt.set_progress(model, step, STEPS)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        nt.after_optimizer_step(model, step, STEPS)
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
