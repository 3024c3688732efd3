"""Conversion to E2M1 by Blackwell's instructions: the codes of the definition, whatever converts.

No machine here has the instructions. The inline PTX is therefore carried out by a few lines below, as the PTX ISA
defines each instruction ("cvt", "prmt", "mov"); that they assemble for each target is what test_kernel_audit.py sees.
"""

import re

import pytest
import torch

from nvfp4_kernels.reference import codecs as reference

pytest.importorskip("triton")
from nvfp4_kernels.triton import codecs, codecs_sm100, conversion_check  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
runs = pytest.mark.skipif(not (GPU or codecs.INTERPRETED.value), reason="no GPU, and triton was imported uninterpreted")
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")

EDGES = [0.0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 7.5, -1e30, 1e-30, -1e-30, 0.2, -0.2]


def values(size: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    x[: len(EDGES)] = torch.tensor(EDGES)
    return x


def nearest(x: torch.Tensor) -> torch.Tensor:
    return reference.encode(reference.nearest_(x.clone(), reference.E2M1), reference.E2M1)


def stochastic(x: torch.Tensor, draws: torch.Tensor, bits: int) -> torch.Tensor:
    return reference.encode(reference.stochastic_(x.clone(), draws, reference.E2M1, bits), reference.E2M1)


def draws_of(size: int) -> torch.Tensor:
    words = torch.randint(0, 2**16, (size,), generator=torch.Generator().manual_seed(9))
    words[:4] = torch.tensor([0, 255, 2**16 - 1, 2**15])
    return words.to(torch.uint16)


def inverted(draws: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_not(draws.view(torch.int16))


def execute(asm: str, registers: dict[str, int | float]) -> int:
    """Carries out inline PTX of ``codecs_sm100``; what it leaves in $0."""
    state = dict(registers)

    def get(name: str):
        return int(name, 16) if name.startswith("0x") else state[name]

    body = re.sub(r"\.reg [^;]*;", "", asm.strip()[1:-1])
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        name, rest = statement.split(None, 1)
        operands = [part.strip() for part in re.split(r",(?![^{]*\})", rest)]
        listed = [[get(n.strip()) for n in op[1:-1].split(",")] for op in operands if op.startswith("{")]
        if name == "cvt.rn.satfinite.e2m1x2.f32":  # the first source goes to the high nibble
            high, low = nearest(torch.tensor([get(operands[1]), get(operands[2])])).tolist()
            result = high << 4 | low
        elif (
            name == "cvt.rs.satfinite.e2m1x4.f32"
        ):  # four sources, the first to the highest nibble; a byte of bits each
            bits = torch.tensor([get(operands[2]) >> shift & 255 for shift in (24, 16, 8, 0)])
            away_below = ((255 - bits) << 8).to(torch.uint16)  # a carry of floor(256 frac) + bits
            codes = stochastic(torch.tensor(listed[0]), away_below, 8).tolist()
            result = codes[0] << 12 | codes[1] << 8 | codes[2] << 4 | codes[3]
        elif name == "prmt.b32":
            pool = [get(operands[1]) >> 8 * k & 255 for k in range(4)] + [
                get(operands[2]) >> 8 * k & 255 for k in range(4)
            ]
            result = sum(pool[get(operands[3]) >> 4 * k & 7] << 8 * k for k in range(4))
        elif name == "mov.b32":  # packs from the lowest up
            width = 32 // len(listed[0])
            result = sum(part << width * k for k, part in enumerate(listed[0]))
        elif name == "and.b32":
            result = get(operands[1]) & get(operands[2])
        else:
            raise AssertionError(f"not known here: {statement}")
        state[operands[0]] = result
    return state["$0"]


@pytest.mark.parametrize("keep", [0xFFFFFFFF, 0xFF00FFFF])
def test_inline_ptx_puts_each_code_in_its_place(keep):
    x, draws = values(512), draws_of(512)
    up16 = inverted(draws).to(torch.int64) & 0xFFFF
    codes = {0: nearest(x), 2: stochastic(x, draws, 8)}
    for start in range(0, 512, 8):
        eight, up = x[start : start + 8].tolist(), up16[start : start + 8].tolist()
        floats = {f"${1 + k}": eight[2 * k] for k in range(4)} | {f"${5 + k}": eight[2 * k + 1] for k in range(4)}
        words = {
            f"${9 + 2 * half + pair}": up[4 * pair + half] | up[4 * pair + 2 + half] << 16
            for half in range(2)
            for pair in range(2)
        }
        for rounding, asm in ((0, codecs_sm100.NEAREST_ASM.value), (2, codecs_sm100.STOCHASTIC_ASM.value)):
            given = floats | ({"$9": keep} if rounding == 0 else words | {"$13": keep})
            byte = codes[rounding][start : start + 8].view(4, 2)
            want = sum((int(low) | int(high) << 4) << 8 * k for k, (low, high) in enumerate(byte)) & keep
            assert execute(asm, given) == want, (start, rounding)


@runs
@pytest.mark.parametrize("rounding, bits", [(0, 0), (1, 16), (2, 8)])
def test_kernel_gives_the_codes_of_the_definition(rounding, bits):
    """On a Blackwell GPU by its instructions, elsewhere by the integer path that stands in for them."""
    x, draws = values(2048 + 6), draws_of(2048 + 6)
    target = "sm_{}{}".format(*torch.cuda.get_device_capability()) if GPU else "none"
    out = torch.empty(x.numel() // 2, dtype=torch.uint8, device=DEVICE)
    codecs_sm100.convert_kernel[(3,)](
        x.to(DEVICE), inverted(draws).to(DEVICE), out, x.numel(),
        ROUNDING=rounding, CONVERT=codecs_sm100.conversion(target), BLOCK=1024,
    )  # fmt: skip
    want = stochastic(x, draws, bits) if rounding else nearest(x)
    assert torch.equal(out.cpu(), want[0::2] | want[1::2] << 4)


def test_which_target_converts_how():
    names = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
    assert [codecs_sm100.conversion(name) for name in names] == [0, 0, 2, 2, 1, 1]


class Gpu:
    """Stands in for a GPU: its capability, and a conversion that errs where it is told to."""

    def __init__(self, monkeypatch, capability, wrong=()):
        def convert(x, up16, rounding, convert):
            codes = (nearest(x), stochastic(x, inverted_back(up16), 16), stochastic(x, inverted_back(up16), 8))[
                rounding
            ]
            return (codes[0::2] | codes[1::2] << 4) ^ ((rounding, convert) in wrong)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(conversion_check, "_convert", convert)
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *where: x if where == (self.device,) else TO(x, *where))
        conversion_check.conversion_on.cache_clear()

    device = torch.device("cuda", 0)


TO = torch.Tensor.to


def inverted_back(up16: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_not(up16).view(torch.uint16)


@pytest.mark.parametrize("capability, best", [((9, 0), 0), ((10, 0), 2), ((10, 3), 2), ((12, 0), 1)])
def test_a_gpu_converts_by_the_instructions_it_has(capability, best, monkeypatch):
    gpu = Gpu(monkeypatch, capability)
    assert conversion_check.conversion_on(gpu.device) == best
    assert conversion_check.conversion_on(torch.device("cpu")) == 0


@pytest.mark.parametrize("wrong, left", [([(2, 2)], 1), ([(2, 2), (0, 2), (0, 1)], 0)])
def test_an_instruction_that_gives_other_codes_is_not_used(wrong, left, monkeypatch):
    gpu = Gpu(monkeypatch, (10, 0), wrong)
    with pytest.warns(UserWarning, match="pairs of codes differ.* is tried in its place"):
        assert conversion_check.conversion_on(gpu.device) == left
    conversion_check.conversion_on.cache_clear()


def test_integer_arithmetic_that_errs_too_is_refused(monkeypatch):
    gpu = Gpu(monkeypatch, (10, 0), [(0, 2), (0, 1), (0, 0)])
    with pytest.warns(UserWarning, match="integer arithmetic is tried"), pytest.raises(RuntimeError, match="reference"):
        conversion_check.conversion_on(gpu.device)
    conversion_check.conversion_on.cache_clear()
