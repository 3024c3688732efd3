"""The shipped recipes against their sources: numbers worked out by hand from the paper or the authors' code, as each
file's header says which."""

import pytest
import torch
from torch import nn

import nvfp4_train as nt
from nvfp4_kernels.reference.quantize import decode, quantize
from nvfp4_train.recipe import GEMMS

torch.set_num_threads(1)

ROUNDING = {  # arXiv:2505.19115, equations 4 to 6
    "fprop.input": "nearest", "fprop.weight": "nearest", "dgrad.grad_output": "stochastic", "dgrad.weight": "nearest",
    "wgrad.grad_output": "stochastic", "wgrad.input": "stochastic",
}  # fmt: skip


def operands(name):
    """{"fprop.input": OperandSpec, ...} of a shipped recipe."""
    recipe = nt.load_recipe(name)
    pairs = [(gemm, getattr(recipe, gemm)) for gemm in GEMMS]
    return {f"{gemm}.{key}": spec for gemm, spec_of in pairs for key, spec in spec_of.operands.items()}


def scales_of(spec, x):
    """What an operand's block scales are worth, for float32 ``x [rows, K]``."""
    made, _ = quantize(x, spec.scheme, None)
    return torch.exp2(made.scales.float() - 127) if spec.scheme.scale == "e8m0" else made.scales


def block_with(amax, columns=32):
    x = torch.full((1, columns), 2.0**-20)
    x[0, 3] = -amax
    return x


def test_fp4_all_the_way_rounds_as_its_equations_say_and_leaves_the_forward_pass_in_4_bits():
    recipe = nt.load_recipe("fp4_all_the_way")
    assert {name: spec.rounding for name, spec in operands("fp4_all_the_way").items()} == ROUNDING
    (phase,) = recipe.schedule
    assert phase.below == pytest.approx(3**0.5) and set(phase.to_dict()) == {"when", "below", "dgrad", "wgrad"}


@pytest.mark.parametrize("amax, scale", [(448.0, 1.0), (448.5, 2.0), (224.0, 0.5), (1.0, 2.0**-8), (3.5, 2.0**-7)])
def test_mxfp8_takes_the_least_power_of_two_that_holds_amax(amax, scale):
    for spec in operands("mxfp8").values():
        assert spec.scheme.element == "e4m3" and scales_of(spec, block_with(amax)).item() == scale


@pytest.mark.parametrize("name, amax, scale", [
    ("mxfp6", 28.0, 1.0), ("mxfp6", 31.9, 1.0), ("mxfp6", 32.0, 2.0), ("mxfp6", 1.0, 2.0**-4),
    ("mxfp6_e2m3", 7.5, 1.0), ("mxfp6_e2m3", 7.9, 1.0), ("mxfp6_e2m3", 8.0, 2.0), ("mxfp6_e2m3", 1.0, 0.25),
])  # fmt: skip
def test_mxfp6_takes_the_exponent_of_amax_less_that_of_the_largest_element(name, amax, scale):
    for spec in operands(name).values():
        assert scales_of(spec, block_with(amax)).item() == scale


def test_deepseek_divides_by_amax_over_448_in_tiles_and_square_blocks():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    for name, spec in operands("deepseek_v3_fp8").items():
        rows, columns = (128, 128) if name.endswith("weight") else (1, 128)
        made, _ = quantize(x, spec.scheme, None)
        for i, j in ((0, 0), (200 // rows - 1, 1), (-1, -1)):
            cut = x[rows * i :][:rows] if i >= 0 else x[-(-200 // rows) * rows - rows :]
            cut = cut[:, 128 * j :][:, :128] if j >= 0 else cut[:, 256:]
            scale = cut.abs().max() / 448
            assert made.scales[i, j] == scale, (name, i, j)
            stored = made.codes.view(torch.float8_e4m3fn)[:, :300]
            part = stored[rows * i :][:rows] if i >= 0 else stored[-(-200 // rows) * rows - rows :]
            part = part[:, 128 * j :][:, :128] if j >= 0 else part[:, 256:]
            assert torch.equal(part.float(), (cut / scale).to(torch.float8_e4m3fn).float()), (name, i, j)


def test_deepseek_keeps_routers_and_heads_in_bf16():
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.up_proj = nn.Linear(128, 4), nn.Linear(128, 128)
            self.gate_proj = nn.Linear(128, 128)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"moe": Moe()}) for _ in range(2))
            self.lm_head = nn.Linear(128, 64)

    report = nt.convert(Model(), "deepseek_v3_fp8")
    assert report.converted == [f"layers.{i}.moe.{name}" for i in range(2) for name in ("up_proj", "gate_proj")]


def test_delayed_scaling_has_the_defaults_of_transformer_engine():
    """E4M3 forward and E5M2 for gradients, a history of 1024, its largest, margin 0."""
    for name, spec in operands("fp8_delayed").items():
        scheme = spec.scheme
        assert scheme.element == ("e5m2" if name.endswith("grad_output") else "e4m3"), name
        assert (scheme.block, scheme.rule, scheme.history, scheme.headroom) == ((0, 0), "delayed", 1024, 1.0)
        given = torch.tensor(2.0)  # the largest of the history; x itself goes up to 4
        made, _ = quantize(torch.tensor([[1.0, -0.37, 4.0, 0.0]]), scheme, None, amax_rows=given, rows_form="both")
        largest = 57344.0 if scheme.element == "e5m2" else 448.0
        stored = torch.tensor([[largest / 2, -0.37 * largest / 2, largest, 0.0]])  # 4 outgrew the history: saturated
        kind = torch.float8_e5m2 if scheme.element == "e5m2" else torch.float8_e4m3fn
        assert torch.equal(made.operand.float(), stored.to(kind).float())


def test_ufp4_divides_a_block_of_16_by_amax_over_7_after_a_16_point_transform():
    specs = operands("ufp4")
    assert [name for name, spec in specs.items() if spec.rounding == "stochastic"] == [
        "dgrad.grad_output", "wgrad.grad_output",
    ]  # fmt: skip
    flat = torch.full((1, 16), 3.0)  # one column of the transform: the rest is 0 where no sign is set
    for spec in specs.values():
        scheme = spec.scheme
        assert (scheme.element, scheme.block, scheme.hadamard) == ("int4", (1, 16), 16)
        bare = nt.OperandSpec.model_validate({**spec.to_dict(), "signs": "none", "rounding": "nearest"}).scheme
        made, _ = quantize(flat, bare, None)
        assert made.scales.item() == torch.tensor(12.0) / 7  # 16 * 3 / sqrt(16) = 12, over 7
        assert decode(made.codes, made.scales, bare, 16, None)[0].tolist() == pytest.approx([12.0] + 15 * [0.0])


@pytest.mark.parametrize("amax, scale", [
    (4.0, 1.0), (6.0, 1.0), (6.96875, 1.0), (7.0, 2.0), (1.7421875, 0.25), (1.75, 0.5),
])  # fmt: skip
def test_mxfp4_fixed_hadamard_rotates_every_operand_alike_and_rounds_amax_first(amax, scale):
    """The kernel adds a quarter of amax's power of two to it and keeps the exponent, less 2."""
    for spec in operands("mxfp4_fixed_hadamard").values():
        scheme = spec.scheme
        assert (scheme.hadamard, scheme.sign_mask, scheme.rounding, scheme.block) == (16, 0, "nearest", (1, 32))
        x = torch.zeros(1, 32)
        x[0, :16] = amax / 4  # without signs the transform gathers these in one element: 16 * amax / 4 / sqrt(16)
        assert scales_of(spec, x).item() == scale
