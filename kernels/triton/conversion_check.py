"""Which conversion instructions a GPU's quantize kernels use: those whose codes are the definition's on this very GPU.

We have not run Blackwell's conversions, and PTX's text leaves open which random bits of ``cvt.rs`` belong to which
element. So the first quantization on such a GPU converts a few thousand numbers both ways. Where they differ, the
integer arithmetic stays: it gives the right codes, only more slowly, and a warning says so; if it errs too, that is an
error.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from nvfp4_kernels.reference import codecs as reference
from nvfp4_kernels.triton import codecs_sm100

SIZE = 1 << 13
ROUNDINGS = ("nearest", "stochastic", "stochastic8")  # in the order of convert_kernel's ROUNDING
SMALLEST_MAJOR = 10


@cache
def conversion_on(device: torch.device) -> int:
    """``codecs_sm100``'s INTEGER, NEAREST or STOCHASTIC for tensors on ``device``."""
    if device.type != "cuda":
        return codecs_sm100.INTEGER
    major, minor = torch.cuda.get_device_capability(device)
    convert = codecs_sm100.conversion(f"sm_{major}{minor}") if major >= SMALLEST_MAJOR else codecs_sm100.INTEGER
    if convert == codecs_sm100.INTEGER:
        return convert
    wrong = differing(device, convert)
    while convert > codecs_sm100.INTEGER and any(wrong.values()):
        warnings.warn(
            f"{wrong} of {SIZE // 2} pairs of codes differ between this GPU's {codecs_sm100.NAMES[convert]} and the "
            f"definition: {codecs_sm100.NAMES[convert - 1]} is tried in its place; please report it "
            "(nvfp4-train audit --device)",
            stacklevel=2,
        )
        convert -= 1
        wrong = differing(device, convert)
    if any(wrong.values()):
        raise RuntimeError(
            f"{wrong} of {SIZE // 2} pairs of codes are wrong on this GPU by integer arithmetic too: choose backend "
            "'reference', and please report it (nvfp4-train audit --device)"
        )
    return convert


def differing(device: torch.device, convert: int, size: int = SIZE) -> dict[str, int]:
    """For each rounding, how many bytes (pairs of codes) are not those of the definition."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, generator=generator) * 3
    x[:8] = torch.tensor([0.0, -0.0, 0.25, -0.25, 5.0, 6.0, -1e9, -1e-9])
    draws = torch.randint(0, 2**16, (size,), generator=generator).to(torch.uint16)
    right = (
        reference.nearest_(x.clone(), reference.E2M1),
        reference.stochastic_(x.clone(), draws, reference.E2M1, 16),
        reference.stochastic_(x.clone(), draws, reference.E2M1, 8),
    )
    inverted = torch.bitwise_not(draws.view(torch.int16)).to(device)
    found = {}
    for index, (name, values) in enumerate(zip(ROUNDINGS, right, strict=True)):
        codes = reference.encode(values, reference.E2M1)
        out = _convert(x.to(device), inverted, index, convert)
        found[name] = int((out.cpu() != (codes[0::2] | codes[1::2] << 4)).sum())
    return found


def _convert(x: Tensor, up16: Tensor, rounding: int, convert: int) -> Tensor:
    out = torch.empty(x.numel() // 2, dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):
        codecs_sm100.convert_kernel[(-(-x.numel() // 1024),)](
            x, up16, out, x.numel(), ROUNDING=rounding, CONVERT=convert, BLOCK=1024
        )
    return out
