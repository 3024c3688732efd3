"""Every recipe runs on the Triton kernels, and they change no bit of a step (here in Triton's interpreter)."""

import pytest
import torch
from torch import nn

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.recipe import recipe_names

pytest.importorskip("triton")
from test_triton_quantize import DEVICE, pytestmark  # noqa: E402, F401

# variants of nvidia_nvfp4 that differ in schedule or layers run the operands of others in this list
ENDINGS = ("last15", "last4", "first2_last8", "late_fprop", "late_backward", "late_both")
SAME = {f"nvidia_nvfp4_{name}" for name in ENDINGS}
RECIPES = [name for name in recipe_names() if name not in SAME and name != "bf16"]


def step(recipe: str, backend: str) -> tuple[list[torch.Tensor], set[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 32)).to(DEVICE)
    nt.convert(net, recipe, backend=backend)
    nt.set_progress(net, 0, 10)
    x = torch.randn(33, 48, device=DEVICE, requires_grad=True)
    torch.manual_seed(1)
    with ledger.recording() as log:
        y = net(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE))
    return [y, x.grad, net[0].weight.grad], {row["backend"] for row in log.operands()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_has_the_bits_of_the_reference(recipe):
    want, _ = step(recipe, "reference+emulated")
    found, backends = step(recipe, "triton+emulated")
    assert backends == {"triton"}
    for a, b in zip(want, found, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
