"""The golden vectors: codes, scales, amax and dequantized values, bitwise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nvfp4_kernels.reference.codecs import E2M1_VALUES
from nvfp4_kernels.reference.hadamard import rotate, signs
from nvfp4_kernels.reference.quantize import decode, dequantize, global_amax, quantize
from nvfp4_kernels.scheme import SIGN_MASK, Scheme

FILE = np.load(Path(__file__).parent / "golden" / "nvfp4_golden.npz")
GOLDEN = {key: torch.from_numpy(FILE[key]) for key in FILE.files if FILE[key].dtype != np.uint16}
NAMES = sorted(key[2:] for key in GOLDEN if key.startswith("x/"))
PARTS = ("q", "s", "amax", "dq")
SETS = ("row1x16", "col1x16", "tile16x16", "col1x16_rht")
ROW, TILE, ROTATED = Scheme(), Scheme(block=(16, 16)), Scheme(hadamard=16)


def quantized(name: str, kind: str):
    """(what our quantizer makes, its amax, its scheme, the input in the orientation of the result)."""
    x = GOLDEN[f"x/{name}"]
    if kind in ("row1x16", "tile16x16"):
        scheme = ROW if kind == "row1x16" else TILE
        return quantize(x, scheme, None, rows_form="both")[0], global_amax(x, scheme, None)[0], scheme, x
    scheme = ROW if kind == "col1x16" else ROTATED
    result = quantize(x, None, scheme, columns_form="both")[1]
    source = x.t() if kind == "col1x16" else GOLDEN[f"{kind}/{name}/rotated"]
    return result, global_amax(x, None, scheme)[1], scheme, source


def test_the_file_is_whole():
    assert len(NAMES) == 8
    assert all(f"{kind}/{name}/{part}" in GOLDEN for kind in SETS for name in NAMES for part in PARTS)


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("name", NAMES)
def test_bitwise(name, kind):
    result, amax, scheme, source = quantized(name, kind)
    want = {part: GOLDEN[f"{kind}/{name}/{part}"] for part in PARTS}
    scales = result.scales.repeat_interleave(16, dim=0) if scheme is TILE else result.scales
    assert torch.equal(scales, want["s"])
    assert torch.equal(amax.view(1), want["amax"])
    # The one exception: the reference gives an input of -0.0 the code 0, we keep its sign (code 8).
    negative_zero = (source == 0) & source.signbit()
    exempt = negative_zero[:, 0::2] * 0x08 + negative_zero[:, 1::2] * 0x80
    assert torch.equal(result.codes ^ exempt.to(torch.uint8), want["q"])
    columns = source.shape[1]
    values = dequantize(result.codes, result.scales, amax, scheme, columns, torch.float32)
    values = torch.where(negative_zero, 0.0, values).contiguous().view(torch.int32)
    assert torch.equal(values, want["dq"].contiguous().view(torch.int32))
    operand = result.operand.contiguous().view(torch.int16)
    assert torch.equal(decode(result.codes, result.scales, scheme, columns).contiguous().view(torch.int16), operand)


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_from_the_rotated_operand(name):
    """The quantizer alone, should the rotation ever differ by an ulp."""
    rotated = GOLDEN[f"col1x16_rht/{name}/rotated"]
    result, _ = quantize(rotated, ROW, None)
    assert torch.equal(result.scales, GOLDEN[f"col1x16_rht/{name}/s"])
    if name != "neg_zero":
        assert torch.equal(result.codes, GOLDEN[f"col1x16_rht/{name}/q"])


@pytest.mark.parametrize("name", NAMES)
def test_rotation(name):
    ours = rotate(GOLDEN[f"x/{name}"], 16, SIGN_MASK, 0).t().to(torch.float32)
    assert torch.equal(ours, GOLDEN[f"col1x16_rht/{name}/rotated"])


def test_constants():
    assert int(FILE["meta/rht_sign_mask"]) == SIGN_MASK
    assert torch.equal(signs(SIGN_MASK, 16), GOLDEN["meta/rht_signs"])
    assert torch.equal(torch.tensor(E2M1_VALUES), GOLDEN["meta/e2m1_values"].abs()[:8])
    # Row i of the transform is the image of unit vector i; the file's matrix is diag(signs) @ H / 4.
    assert torch.equal(rotate(torch.eye(16), 16, SIGN_MASK, 1).to(torch.float32), GOLDEN["meta/rht_matrix"])
