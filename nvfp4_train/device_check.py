"""The self-check of a Blackwell GPU: a report for the first who has one, to be pasted into an issue.

    nvfp4-train audit --device

    exact        products whose every sum is exact in any order: each element must be right
    random       native against emulated on the same operands; both against the exact sum, in units of what float32
                 sums of that length may differ by: a difference beyond it is not one of order
    conversions  codes of the conversion instructions against the definition
    layer        forward and backward of one layer, native against emulated
    instruction  the matrix instruction in the machine code that was loaded and run
    speed        native and cuBLASLt against BF16, the product alone and with the layout of its operands

We have compiled these kernels for Blackwell and read their instructions, and have not run them on one.
"""

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import nvfp4_train as nt
from nvfp4_kernels.fp4 import VECTOR
from nvfp4_train.backend import NATIVE, native_missing
from nvfp4_train.benchmark import captured, kernel_times, median_seconds
from nvfp4_train.version import __version__

SIZES = (1000, 1536, 2080)  # M, N, K of the products that are compared: no multiples of a tile
LAYER = (272, 1040, 528)  # tokens, in, out
EXECUTED = (512, 512, 512)
SPEED = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 14336, 4096))
SPECS = {
    "nvfp4": nt.OperandSpec(format="nvfp4", block="1x16", rounding="nearest"),
    "mxfp4": nt.OperandSpec(format="mxfp4", block="1x32", rounding="nearest", scale_rule="ceil"),
}


def device_report(
    device: torch.device | str = "cuda", sizes: tuple = SIZES, layer_sizes: tuple = LAYER, speed: tuple = SPEED
) -> dict[str, Any]:
    """Every section of the check by name; ``faults``: how many rows of them do not hold. Speed decides nothing.

    A backend that cannot run here stands with its reason. Raises ValueError where the device has no FP4 tensor cores.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("audit --device needs a CUDA device, and torch sees none")
    backends = {name: _reason(device, name) for name in NATIVE}
    if all(backends.values()):
        raise ValueError(backends["native"])
    usable = [name for name, reason in backends.items() if reason is None]
    pairs = [(name, format_) for name in usable for format_ in SPECS if name == "native" or format_ == "nvfp4"]
    report: dict[str, Any] = {"machine": machine(device), "backends": backends}
    report["exact"] = [_guarded(exact, device, *pair) for pair in pairs]
    report["random"] = [_guarded(random, device, *pair, sizes) for pair in pairs]
    report["conversions"] = _guarded(conversions, device)
    report["layer"] = [_guarded(layer, device, name, layer_sizes) for name in usable]
    report["instruction"] = [_guarded(executed, device, *pair) for pair in pairs]
    report["speed"] = [_guarded(measure, device, usable, shape) for shape in speed]
    checked = [*report["exact"], *report["random"], report["conversions"], *report["layer"], *report["instruction"]]
    report["faults"] = sum(not row["ok"] for row in checked)
    return report


def device_lines(report: dict[str, Any]) -> list[str]:
    """The report as text that can be pasted."""
    lines = ["nvfp4-train audit --device"]
    for name, section in report.items():
        if isinstance(section, list):
            lines += [f"{name}:", *(f"  {_flat(row)}" for row in section)]
        elif isinstance(section, dict):
            lines.append(f"{name}: {_flat(section)}")
    lines.append("all of it holds" if not report["faults"] else "NOT ALL OF IT HOLDS: please paste this into an issue")
    return lines


def machine(device: torch.device) -> dict[str, str]:
    import triton

    found = {"nvfp4_train": __version__, "torch": torch.__version__, "triton": triton.__version__}
    found |= {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["target"] = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return found


def exact(device: torch.device, backend: str, format_: str) -> dict[str, Any]:
    """Whether every element of a product with exact sums is right."""
    from nvfp4_kernels.triton.native_check import verified

    wrong = verified(backend, format_, device)
    return {"backend": backend, "format": format_, "wrong": wrong or "none", "ok": wrong is None}


def random(device: torch.device, backend: str, format_: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Gaussian operands: the largest error of native and emulated, over K * 2^-24 * (|a| @ |b|.T), per element."""
    m, n, k = sizes
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).to(device, torch.bfloat16) for rows in (m, n))
    qa, qb = (nt.quantize(x, SPECS[format_], backend="triton") for x in (a, b))
    values = [q.dequantize(torch.float64) for q in (qa, qb)]
    right = values[0] @ values[1].T
    # one unit for each of K additions, and a few for the epilogue's factor, in float32
    unit = (k + 4) * 2.0**-24 * (values[0].abs() @ values[1].abs().T)
    errors = {}
    for name in (backend, "emulated"):
        product = nt.matmul(qa, qb, torch.float32, backend=name).double()
        errors[name] = ((product - right).abs() / unit).max().item()
    return {
        "backend": backend, "format": format_, "sizes": f"{m}x{n}x{k}", "error_native": errors[backend],
        "error_emulated": errors["emulated"], "ok": max(errors.values()) <= 1.0,
    }  # fmt: skip


def conversions(device: torch.device) -> dict[str, Any]:
    """How many codes the conversion instructions of this GPU give that the definition does not."""
    from nvfp4_kernels.triton.codecs_sm100 import conversion
    from nvfp4_kernels.triton.conversion_check import SIZE, differing

    best = conversion(machine(device).get("target", ""))
    found = differing(device, best)
    used = ("integer", "cvt.rn", "cvt.rn and cvt.rs")[best]
    return {"instructions": used, "pairs": SIZE // 2, "differing": found, "ok": not any(found.values())}


def layer(device: torch.device, backend: str, sizes: tuple[int, int, int] = LAYER) -> dict[str, Any]:
    """Largest difference of y, dx and dw of a layer on ``backend`` to the emulated one, over the largest value."""
    tokens, k, n = sizes
    results = {}
    for name in (backend, "emulated"):
        generator = torch.Generator().manual_seed(2)
        made = nt.QuantizedLinear(k, n, bias=False, backend=f"triton+{name}", label=f"check {name}", device=device)
        made.weight.data.copy_(torch.randn(n, k, generator=generator))
        x = torch.randn(tokens, k, generator=generator).to(device).requires_grad_()
        torch.manual_seed(3)  # the same draws
        y = made(x)
        y.backward(torch.randn(tokens, n, generator=generator).to(device))
        results[name] = {"y": y.detach(), "dx": x.grad, "dw": made.weight.grad}
    off = {
        key: ((results[backend][key] - want).abs().max() / want.abs().max()).item()
        for key, want in results["emulated"].items()
    }
    # order of float32 sums only: far below one part in ten thousand at these lengths
    return {"backend": backend, **off, "ok": max(off.values()) < 1e-4}


def executed(device: torch.device, backend: str, format_: str) -> dict[str, Any]:
    """What multiplied: instructions of the Triton kernel that was loaded and run, in PTX and machine code; of cuBLASLt,
    which has no PTX to read, the names of its kernels."""
    row: dict[str, Any] = {"backend": backend, "format": format_}
    a, b = _operands(device, format_, EXECUTED)
    if backend == "cublaslt":
        names = list(kernel_times(lambda: _multiply(backend, format_, a, b), device))
        return row | {"kernels": names, "ok": bool(names)}
    from nvfp4_kernels import targets
    from nvfp4_kernels.instructions import report
    from nvfp4_kernels.triton.native_matmul import launch

    out = torch.empty(EXECUTED[:2], dtype=torch.bfloat16, device=device)
    told = report(launch(a, b, None, VECTOR[format_], out, False))
    faults = targets.faults(told, targets.Configuration("", "", told.target, format_, None))
    return row | {"instructions": [*told.instructions, *told.machine_code], "faults": faults, "ok": not faults}


def measure(device: torch.device, backends: list[str], shape: tuple[int, int, int]) -> dict[str, Any]:
    """TFLOP/s of BF16 and of NVFP4, the median of alternating runs in CUDA graphs."""
    m, n, k = shape
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    functions: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b.T}
    quantized = _quantized(device, "nvfp4", shape)
    operands = _operands(device, "nvfp4", shape)
    for name in backends:
        functions[name] = lambda name=name: _multiply(name, "nvfp4", *operands)
        functions[f"{name}_with_layout"] = lambda name=name: nt.matmul(*quantized, backend=name)
    times = median_seconds({name: captured(run, device) for name, run in functions.items()}, device)
    row: dict[str, Any] = {"shape": f"{m}x{n}x{k}"}
    for name, seconds in times.items():
        row[f"{name}_tflops"] = 2 * m * n * k / seconds / 1e12
    return row | {f"{name}_over_bf16": times["bf16"] / times[name] for name in times if name != "bf16"}


def _quantized(device: torch.device, format_: str, sizes: tuple[int, int, int]) -> list[nt.QuantizedTensor]:
    m, n, k = sizes
    return [
        nt.quantize(torch.randn(rows, k, device=device, dtype=torch.bfloat16), SPECS[format_], backend="triton")
        for rows in (m, n)
    ]


def _operands(device: torch.device, format_: str, sizes: tuple[int, int, int]) -> list:
    from nvfp4_kernels.triton.native_operands import native_operand

    return [native_operand(q.codes, q.scale_bytes, q.scheme, q.rows) for q in _quantized(device, format_, sizes)]


def _multiply(backend: str, format_: str, a, b) -> Tensor:
    if backend == "cublaslt":
        from nvfp4_kernels.cublaslt import nvfp4_matmul

        return nvfp4_matmul(a, b, None)
    from nvfp4_kernels.triton.native_matmul import native_matmul

    return native_matmul(a, b, None, VECTOR[format_])


def _reason(device: torch.device, backend: str) -> str | None:
    """Why ``backend`` cannot run here; None if it can. What its products are worth is checked apart."""
    if backend == "native":
        return native_missing(device)
    from nvfp4_kernels import cublaslt

    return native_missing(device) or cublaslt.missing()


def _guarded(section: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """A section that fails is a finding, and the others go on."""
    try:
        return section(*arguments)
    except Exception as error:  # whatever a compiler, a driver or a library may raise
        text = " ".join(str(error).split())
        given = [str(item) for item in arguments[1:] if isinstance(item, str | tuple)]
        return {
            "section": " ".join([section.__name__, *given]),
            "failed": f"{type(error).__name__}: {text[:500]}",
            "ok": False,
        }


def _flat(row: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_value(value)}" for key, value in row.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(item)}" for key, item in value.items()) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
