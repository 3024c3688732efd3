"""The audit's own arithmetic: it accepts what each scheme makes of a tensor, and nothing that another scheme makes."""

from dataclasses import replace

import pytest
import torch

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train.auditing.operands import agreement, mask_of, not_checked, rotation, signs_of
from nvfp4_train.auditing.scale_rules import grid
from nvfp4_train.recipe import load_recipe, recipe_names

SEED = torch.tensor(5)


def schemes() -> list[str]:
    """Every way to quantize an operand that a shipped recipe uses."""
    found = {}
    for name in recipe_names():
        for text in load_recipe(name).plan(0.0):
            if text != "bf16":
                found.setdefault(text)
    return list(found)


def made(x, scheme, transposed):
    rows, columns = (None, scheme) if transposed else (scheme, None)
    forms = reference.quantize(x, rows, columns, seed=SEED, rows_form="decoded", columns_form="decoded")
    return forms[int(transposed)].operand


def look(x, transposed, operand, scheme):
    return agreement(x, transposed, operand, scheme, mask=mask_of(x, transposed, operand, scheme, SEED))


@pytest.mark.parametrize("text", schemes())
def test_what_a_scheme_makes_is_accepted_and_its_rounding_is_as_expected(text):
    scheme = Scheme.parse(text)
    assert not not_checked(scheme)
    torch.manual_seed(0)
    for x in (torch.randn(46, 48), torch.randn(33, 130) * torch.logspace(-3, 1, 130)):
        for transposed in (False, True):
            operand = made(x, scheme, transposed)
            found = look(x, transposed, operand, scheme)
            assert found.holds and found.choice == 1.0
            if scheme.stochastic:
                assert abs(found.farther - found.farther_expected) < 5 * found.farther_variance**0.5
                assert abs(found.lean) < 5 * found.lean_variance**0.5
            else:
                assert found.farther <= 0.05 * found.farther_expected  # ties alone


CONFUSED = [
    ("e2m1:e4m3:nvfp4:1x16:nearest", dict(block=(16, 16))),
    ("e2m1:e4m3:nvfp4:16x16:nearest", dict(block=(1, 16))),
    ("e2m1:e4m3:nvfp4:1x16:nearest", dict(range=256.0)),
    ("e2m1:e4m3:nvfp4:1x16:nearest", dict(rounding="stochastic")),
    ("e2m1:e4m3:nvfp4:1x16:stochastic", dict(hadamard=16)),
    ("e2m1:e4m3:nvfp4:1x16:stochastic:h16:D7E8", dict(sign_mask=0xD7E9)),
    ("e2m1:e4m3:nvfp4:1x16:stochastic:h16:D7E8", dict(hadamard=0)),
    ("e2m1:e8m0:floor:1x32:nearest", dict(rule="ceil")),
    ("e2m1:e8m0:up:1x32:nearest", dict(rule="even")),
    ("e2m1:e8m0:floor:1x32:nearest", dict(headroom=4 / 3)),
    ("e4m3:e8m0:up:1x32:nearest", dict(element="e2m3")),
    ("e2m1:e4m3:nvfp4:1x16:nearest", dict(outer=(1, 128))),
]


@pytest.mark.parametrize("text, changes", CONFUSED)
def test_what_another_scheme_makes_is_not(text, changes):
    torch.manual_seed(0)
    scheme = Scheme.parse(text)
    x = torch.randn(48, 128) * torch.rand(48, 1).add(0.5)
    operand = made(x, replace(scheme, **changes), False)
    found = look(x, False, operand.float(), scheme)
    assert found is None or found.explained < 0.95


def test_four_over_six_that_never_takes_four_is_not_the_smaller_error():
    scheme = Scheme.parse("e2m1:e4m3:nvfp4:1x16:nearest:range=256.0:select=mse")
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    ignored = look(x, False, made(x, replace(scheme, select=""), False), scheme)
    assert ignored.second == 0.0 and ignored.choice < 0.7
    found = look(x, False, made(x, scheme, False), scheme)
    assert 0.2 < found.second < 0.7 and found.choice == 1.0


def test_signs_are_read_off_the_operand():
    scheme = Scheme.parse("e2m1:e4m3:nvfp4:1x16:stochastic:h16:1234")
    x = torch.randn(46, 32)
    for transposed in (False, True):
        mask, certain = signs_of(x, transposed, made(x, scheme, transposed), scheme)
        assert mask == 0x1234 and certain > 0.9
    assert torch.allclose(rotation(16, 0xD7E8) @ rotation(16, 0xD7E8).T, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize(
    "element, count, least, largest",
    [
        ("e2m1", 8, 0.5, 6.0), ("e3m2", 32, 0.0625, 28.0), ("e2m3", 32, 0.125, 7.5), ("e4m3", 127, 2.0**-9, 448.0),
        ("e5m2", 124, 2.0**-16, 57344.0), ("int4", 8, 1.0, 7.0), ("int8", 128, 1.0, 127.0),
    ],
)  # fmt: skip
def test_the_magnitudes_of_an_element(element, count, least, largest):
    values = grid(element)
    assert len(values) == count and values[0] == 0 and values[1] == least and values[-1] == largest
    assert (values[1:] > values[:-1]).all()


def test_scales_that_underflow_and_saturate_are_counted():
    x = torch.randn(16, 64).clamp(-1, 1)
    x[:, :16] *= 1e-9
    scheme = Scheme()
    found = look(x, False, made(x, scheme, False), scheme)
    assert found.holds and found.scale_underflow == 0.25 and found.underflow >= 0.25
    assert found.amax == 1.0 or found.amax == pytest.approx(float(x.abs().max()))
