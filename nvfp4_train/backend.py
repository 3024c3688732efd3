"""Which backend runs: chosen once for a layer, from its device, and never changed in silence."""

import importlib.util
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch

from nvfp4_kernels import cublas
from nvfp4_kernels.fp4 import fp4_format
from nvfp4_kernels.scheme import Scheme

QUANTIZE = ("reference", "triton")
NATIVE = ("native", "cublaslt")  # FP4 tensor cores, by this library's Triton kernel or by NVIDIA's library
MATMUL = ("emulated", *NATIVE)


class Backend(NamedTuple):
    """``quantize``: reference (PyTorch, any device) or triton. ``matmul``: emulated (BF16 GEMM), or FP4 tensor cores:
    native (Triton) or cublaslt (NVFP4 only)."""

    quantize: str
    matmul: str

    @property
    def operand_form(self) -> str:
        """What a GEMM reads: ``packed`` codes on FP4 tensor cores, ``decoded`` BF16 elsewhere."""
        return "packed" if self.matmul in NATIVE else "decoded"

    def form_of(self, kept: bool) -> str:
        """The form of an operand that a GEMM reads and that is ``kept`` packed for another one."""
        return "both" if kept and self.operand_form == "decoded" else self.operand_form

    def __str__(self) -> str:
        return f"{self.quantize}+{self.matmul}"


def choose(device: torch.device, request: str | None = None, operands: Iterable[str] = ()) -> Backend:
    """The backend for tensors on ``device``; ``request`` names one: ``reference``, ``triton``, ``emulated``,
    ``native``, ``cublaslt`` or a pair such as ``triton+emulated``. ``operands``: the schemes of what will be
    multiplied, as text.

    Unasked, FP4 tensor cores are chosen where the device has them, Triton can reach them and every quantized operand is
    FP4. Before they are used for the first time on a device they multiply once where the exact result is known.

    Raises ValueError, with what to do, where the request cannot run on this machine.
    """
    quantize, matmul = _parse(request, device)
    schemes = [Scheme.parse(text) for text in dict.fromkeys(operands) if text != "bf16"]
    formats = list(dict.fromkeys(fp4_format(scheme) for scheme in schemes)) or ["nvfp4"]
    if matmul is None:
        able = device.type == "cuda" and quantize == "triton" and None not in formats
        matmul = "native" if able and native_missing(device) is None else "emulated"
    if quantize == "triton":
        _require_triton(device)
    if matmul in NATIVE:
        _require_native(device, quantize, matmul, formats)
    if device.type == "cuda" and cublas.available():
        cublas.prepare(device)
    return Backend(quantize, matmul)


def _parse(request: str | None, device: torch.device) -> tuple[str, str | None]:
    quantize, matmul = ("triton" if device.type == "cuda" and _triton_kernels() else "reference"), None
    for word in (request or "").split("+") if request else ():
        if word in QUANTIZE:
            quantize = word
        elif word in MATMUL:
            matmul = word
        else:
            raise ValueError(f"unknown backend {word!r}: choose from {', '.join(QUANTIZE + MATMUL)}")
    return quantize, matmul


def native_missing(device: torch.device) -> str | None:
    """Why FP4 tensor cores cannot be reached on ``device``, as a sentence that says what to do; None if they can."""
    if device.type == "meta":
        return None
    if device.type != "cuda":
        return f"an FP4 product needs a Blackwell GPU, not {device}: choose 'emulated', which gives the same numbers"
    major, minor = torch.cuda.get_device_capability(device)
    target = f"sm_{major}{minor}"
    if major < 10:
        return f"{device} is {target}, without FP4 tensor cores: choose 'emulated', which gives the same numbers"
    if not _triton_kernels():
        return "an FP4 product needs the triton package: install it, or choose 'emulated'"
    from nvfp4_kernels import targets  # triton is not installed everywhere

    try:
        targets.require(target)
    except ValueError as error:
        return f"{error}, or choose 'emulated'"
    return None


def _require_native(device: torch.device, quantize: str, matmul: str, formats: list[str | None]) -> None:
    interpreted = device.type == "cpu" and quantize == "triton"  # Triton's interpreter stands in for the GPU
    reason = None if interpreted and matmul == "native" else native_missing(device)
    if reason is None and None in formats:
        reason = "a recipe with operands that no FP4 instruction reads needs the backend 'emulated'"
    if reason is None and matmul == "cublaslt":
        from nvfp4_kernels import cublaslt

        reason = cublaslt.missing()
        if reason is None and formats != ["nvfp4"]:
            reason = "cublaslt multiplies NVFP4 only: choose 'native' or 'emulated'"
    if reason is not None:
        raise ValueError(reason)
    if device.type == "cuda" and not torch.compiler.is_compiling():
        from nvfp4_kernels.triton.native_check import verified

        index = torch.cuda.current_device() if device.index is None else device.index
        for format_ in formats:
            wrong = verified(matmul, format_, torch.device("cuda", index))
            if wrong is not None:
                raise ValueError(
                    f"the {matmul} {format_} product is not right on this GPU ({wrong}): choose 'emulated', "
                    "and please report what nvfp4-train audit --device prints"
                )


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
