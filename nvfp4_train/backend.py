"""Which backend runs: chosen once for a layer, from its device, and never changed in silence."""

import importlib.util
import os
from typing import NamedTuple

import torch

from nvfp4_kernels import cublas

QUANTIZE = ("reference", "triton")
MATMUL = ("emulated", "native")


class Backend(NamedTuple):
    """``quantize``: reference (PyTorch, any device) or triton. ``matmul``: emulated (BF16 GEMM) or native (FP4 MMA)."""

    quantize: str
    matmul: str

    def __str__(self) -> str:
        return f"{self.quantize}+{self.matmul}"


def choose(device: torch.device, request: str | None = None) -> Backend:
    """The backend for tensors on ``device``; ``request`` names one: ``reference``, ``triton``, ``native`` or a pair
    such as ``triton+emulated``.

    Raises ValueError, with what to do, where the request cannot run on this machine.
    """
    quantize, matmul = _parse(request, device)
    if matmul == "native":
        raise ValueError(
            "the native FP4 matmul is not part of this version: choose 'emulated', which gives the same numbers"
        )
    if quantize == "triton":
        _require_triton(device)
    if device.type == "cuda" and cublas.available():
        cublas.prepare(device)
    return Backend(quantize, matmul)


def _parse(request: str | None, device: torch.device) -> tuple[str, str]:
    quantize, matmul = ("triton" if device.type == "cuda" and _triton_kernels() else "reference"), "emulated"
    for word in (request or "").split("+") if request else ():
        if word in QUANTIZE:
            quantize = word
        elif word in MATMUL:
            matmul = word
        else:
            raise ValueError(f"unknown backend {word!r}: choose from {', '.join(QUANTIZE + MATMUL)}")
    return quantize, matmul


def _triton_kernels() -> bool:
    return (
        importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec("nvfp4_kernels.triton.quantize") is not None
    )


def _require_triton(device: torch.device) -> None:
    if not _triton_kernels():
        raise ValueError("backend 'triton' needs the triton package: install it, or choose backend 'reference'")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ValueError(
                f"backend 'triton' needs compute capability 8.0 or newer, {device} has {major}.{minor}: "
                "choose backend 'reference'"
            )
    elif device.type != "meta" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend 'triton' needs a CUDA device, not {device}: choose backend 'reference'")
