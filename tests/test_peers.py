"""Bitwise agreement with independent implementations, where pip has them; and where they are wrong and this is right.

`torchao` (MXTensor) and `fouroversix` (its PyTorch backend) are test-only dependencies: without them these tests are
skipped, with the reason. Every tensor spans many magnitudes, so that subnormal scales, ties and zeros occur.

    pip install --no-deps torchao==0.18.0 vcs_versioning setuptools_scm ninja
    SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix==1.0.5
"""

import importlib

import pytest
import torch

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.reference.codecs import unpack
from nvfp4_kernels.reference.quantize import decode, quantize
from nvfp4_kernels.scheme import Scheme

torch.set_num_threads(1)


def peer(name):
    """The peer's module, or a skip that says what is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        pytest.skip(f"needs the peer {package}, a test-only dependency: pip install {package} ({error})")


def spread_tensor(rows=256, columns=256, seed=0):
    """float32: Gaussian values whose rows differ by up to 2^40, with zero blocks, ties and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    x[3, :64] = 0.0
    x[4, 5] = -0.0
    x[5, :32] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 4)
    x[6, :32] = torch.tensor([448.0, 7.0, 28.0, 7.5] * 8)
    x[7] = torch.exp2(torch.arange(columns).float() / 8 - 16)
    return x


def ours(x, scheme):
    made, _ = quantize(x, Scheme.parse(scheme), None)
    return made


# torchao: MXTensor

ELEMENT_TYPES = {
    "e2m1": "float4_e2m1fn_x2", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3",
}  # fmt: skip


def torchao_quantized(x, element, mode):
    """(scale bytes, codes) of torchao, one code a byte but for packed E2M1."""
    mx = peer("torchao.prototype.mx_formats.mx_tensor")
    kind = ELEMENT_TYPES[element]
    scales, data = mx.to_mx(x, getattr(torch, kind, kind), 32, mx.ScaleCalculationMode[mode])
    return scales.view(torch.uint8), data.view(torch.uint8)


@pytest.mark.parametrize("element", list(ELEMENT_TYPES))
@pytest.mark.parametrize("mode, rule", [("FLOOR", "floor"), ("EVEN", "even"), ("RCEIL", "up")])
def test_torchao_mx(element, mode, rule):
    x = spread_tensor()
    scales, codes = torchao_quantized(x, element, mode)
    made = ours(x, f"{element}:e8m0:{rule}:1x32:nearest")
    assert torch.equal(made.scales, scales)
    assert torch.equal(made.codes, codes)


def test_torchao_rceil_is_deepseeks_rule_above_its_floor():
    x = spread_tensor()[:, :64]
    x = x[x.abs().amax(1) > 1.0]
    scales, codes = torchao_quantized(x.contiguous(), "e2m1", "RCEIL")
    made = ours(x, "e2m1:e8m0:ceil:1x32:nearest")
    large = x.view(len(x), 2, 32).abs().amax(2) > 1e-4
    assert torch.equal(made.scales[large], scales[large]) and large.sum() > 100
    same = large.repeat_interleave(16, 1)
    assert torch.equal(made.codes[same], codes[same])


def test_torchao_ceil_is_another_rule():
    x = torch.zeros(1, 32)
    x[0, 0] = 5.0  # fits 6 * 2^0; CEIL rounds 5 up to 8 and takes 2^1
    scales, _ = torchao_quantized(x, "e2m1", "CEIL")
    assert scales.item() - 127 == 1
    assert ours(x, "e2m1:e8m0:ceil:1x32:nearest").scales.item() - 127 == 0
    assert ours(x, "e2m1:e8m0:up:1x32:nearest").scales.item() - 127 == 0


# fouroversix: its PyTorch backend

PEER_ERROR = {"mse": "mse", "mae": "mae", "max": "abs_max"}


def fouroversix_quantized(x, rule, square=False, kind="nvfp4"):
    """(scale bytes [R, C / 16], codes one a byte) of fouroversix."""
    reference = peer("fouroversix.quantize.pytorch.reference")
    utils = peer("fouroversix.utils")
    packed, scales, _ = reference.quantize_to_fp4(
        x, block_scale_2d=square, fp4_format=utils.DataType(kind), scale_rule=utils.ScaleRule(rule),
        use_blackwell_scale_layout=False,
    )  # fmt: skip
    codes = torch.stack((packed & 15, packed >> 4), dim=2).view(x.shape)
    return scales.view(torch.uint8).view(x.shape[0], -1), codes


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("error", list(PEER_ERROR))
def test_four_over_six(error, square):
    generator = torch.Generator().manual_seed(1)
    size = torch.exp2(torch.randint(-4, 4, (32, 1), generator=generator)).repeat_interleave(16, 0)
    flat = torch.rand(512, 256, generator=generator) * 0.4 + 0.6  # so that 4 wins in 16x16 tiles too
    x = torch.where(size > 1, torch.randn(512, 256, generator=generator), flat) * size
    x[:16, :64] = 0.0
    scales, codes = fouroversix_quantized(x, PEER_ERROR[error], square)
    block = "16x16" if square else "1x16"
    made = ours(x, f"e2m1:e4m3:nvfp4:{block}:nearest:range=256.0:select={error}")
    own_scales = made.scales.repeat_interleave(16, 0) if square else made.scales
    own_codes = torch.stack((made.codes & 15, made.codes >> 4), dim=2).view(x.shape)
    zero = (scales == 0).repeat_interleave(16, 1)  # a scale of 0 makes every code mean 0; the peer writes code 0
    differ = own_scales != scales
    if error == "max":
        assert not differ.any()
    else:  # the peer sums a block's errors in an order of its own: an all but exact tie may fall the other way
        assert _near_ties(x, scales, codes, own_scales, own_codes, differ, error, square)
        assert differ.sum() <= 4 * (256 if square else 1)
    same = ~(differ.repeat_interleave(16, 1) | zero)
    assert torch.equal(own_codes[same] % 8, codes[same] % 8)
    signed = same & (own_codes % 8 != 0)  # the peer's zeros lose their sign
    assert torch.equal(own_codes[signed], codes[signed])
    chosen = _share_of_four(x, scales, square)
    assert 0.05 < chosen < 0.98  # both scales are chosen


def _signless_zeros(packed):
    codes = torch.stack((packed & 15, packed >> 4), dim=2)
    return torch.where(codes == 8, 0, codes)


def _values(scales, codes, amax):
    values = unpack(codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.float64)
    return values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1) * amax.double() / 1536


def _near_ties(x, scales, codes, own_scales, own_codes, differ, error, square):
    amax = x.abs().max()
    tile = 16 if square else 1
    errors = []
    for s, c in ((scales, codes), (own_scales, own_codes)):
        difference = (_values(s, c, amax) - x.double()).abs()
        block = (difference.square() if error == "mse" else difference).view(-1, tile, x.shape[1] // 16, 16)
        errors.append(block.sum((1, 3)).repeat_interleave(tile, 0))
    close = (errors[0] - errors[1]).abs() <= 1e-5 * errors[0]
    return bool(close[differ].all())


def _share_of_four(x, scales, square):
    plain, _ = fouroversix_quantized(x, "static_6", square)
    base = ours(x, f"e2m1:e4m3:nvfp4:{'16x16' if square else '1x16'}:nearest:range=256.0").scales
    base = base.repeat_interleave(16, 0) if square else base
    assert plain.shape == base.shape
    return (scales > base).float().mean().item()


def test_fouroversix_loses_a_blocks_largest_element_under_a_subnormal_scale():
    """It does not clamp before it encodes: 7.2 of the smallest scale becomes 8, whose code means -0."""
    x = torch.zeros(128, 64)
    x[0, 0] = 1.0  # the tensor's amax: block scales are x / 6 * 1536
    x[1, 0] = 7.2 * 2.0**-9 / 1536
    scales, codes = fouroversix_quantized(x, "mse")
    assert scales[1, 0] == 1 and codes[1, 0] == 8, "the peer was mended: drop this test"
    scheme = Scheme.parse("e2m1:e4m3:nvfp4:1x16:nearest:range=256.0:select=mse")
    made = ours(x, str(scheme))
    value = decode(made.codes, made.scales, scheme, 64)[1, 0].item() / 1536
    assert abs(value / x[1, 0].item() - 1) < 0.2


def test_fouroversix_divides_zero_by_zero_on_a_zero_mxfp4_block():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    x[0, :32] = 0.0
    reference, utils = peer("fouroversix.quantize.pytorch.reference"), peer("fouroversix.utils")
    blocks, _ = reference.quantize_to_mxfp4(x.view(-1, 32), scale_rule=utils.ScaleRule.static_6)
    assert blocks[0].isnan().all(), "the peer was mended: drop this test"
    made = ours(x, "e2m1:e8m0:up:1x32:nearest")
    assert (decode(made.codes, made.scales, Scheme.parse("e2m1:e8m0:up:1x32:nearest"), 128)[0, :32] == 0).all()


def test_fouroversix_mxfp4():
    x = spread_tensor(128, 256)
    x = torch.where(x.view(128, 8, 32).abs().amax(2, keepdim=True) == 0, 1.0, x.view(128, 8, 32)).view(128, 256)
    reference, utils = peer("fouroversix.quantize.pytorch.reference"), peer("fouroversix.utils")
    packed, scales, _ = reference.quantize_to_fp4(
        x, fp4_format=utils.DataType.mxfp4, scale_rule=utils.ScaleRule.static_6, use_blackwell_scale_layout=False
    )
    made = ours(x, "e2m1:e8m0:up:1x32:nearest")
    assert torch.equal(made.scales, scales.view(torch.uint8).view(128, 8))
    assert torch.equal(_signless_zeros(made.codes), _signless_zeros(packed))  # the peer's zeros lose their sign


def test_the_peers_have_the_elements_limits():
    """A cheap sanity check of the table the tests above lean on."""
    mx = peer("torchao.prototype.mx_formats.constants")
    limits = {"e2m1": mx.F4_E2M1_MAX, "e3m2": mx.F6_E3M2_MAX, "e2m3": mx.F6_E2M3_MAX, "e4m3": mx.F8E4M3_MAX}
    assert {name: ELEMENTS[name].largest for name in limits} == limits
