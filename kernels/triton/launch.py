"""Launch a compiled kernel without the JIT's argument handling, which is most of the host time of a small launch.

Triton specialises a kernel on whether pointers are multiples of 16, on integers and on constants, and finds that out
anew at each launch. Here one key says it all; the first launch goes through the JIT, later ones straight to what it
compiled.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.triton.codecs import INTERPRETED

_compiled: dict[Hashable, tuple] = {}


class Work(NamedTuple):
    """What a launch needs beyond its arguments; found once for a shape, since it costs host time."""

    programs: int
    constants: dict
    warps: int
    registers: int = 0  # at most for a thread; 0: as many as the compiler likes


def launch(kernel, work: Work, key: Hashable, arguments: tuple) -> None:
    """Runs ``kernel`` on the device of the first argument, a tensor. ``key`` must tell ``work`` from every other.

    Kernels are compiled without fused multiply-adds: where the definition rounds twice, one rounding changes bits.
    """
    device = arguments[0].device
    key = (kernel, device.index, key, *[a.data_ptr() & 15 == 0 if isinstance(a, Tensor) else a for a in arguments])
    if device.index is None or device.index == torch.cuda.current_device():
        _launch(kernel, work, key, arguments)
    else:  # Triton launches on the current device
        with torch.cuda.device(device):
            _launch(kernel, work, key, arguments)


def _launch(kernel, work: Work, key: Hashable, arguments: tuple) -> None:
    known = _compiled.get(key)
    if known is not None:
        compiled, values = known
        compiled[(work.programs, 1, 1)](*arguments, *values)
        return
    options = dict(num_warps=work.warps, enable_fp_fusion=False)
    if work.registers:
        options["maxnreg"] = work.registers
    compiled = kernel[(work.programs,)](*arguments, **work.constants, **options)
    if not INTERPRETED.value:
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(work.constants[name] for name in names)
