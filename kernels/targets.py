"""Every kernel and tile that this library launches on Blackwell, and what its machine code must hold.

A configuration that the audit refuses must not be shipped: each of these faults costs at least half of the speed and
none of them shows in the numbers. (What Triton does where is in triton/native_matmul.py.)

``python -m nvfp4_kernels.targets sm_100`` prints what ``report_of`` returns, as JSON, by the Triton it finds.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import triton

from nvfp4_kernels.fp4 import VECTOR
from nvfp4_kernels.instructions import TENSOR_MEMORY, Report, compile_for, divisible, report
from nvfp4_kernels.scheme import Scheme

TARGETS = ("sm_100", "sm_103", "sm_120", "sm_121")
SHARED_MEMORY = {100: 232448, 103: 232448, 120: 101376, 121: 101376}  # bytes that a program may use
# The first Triton whose FP4 product for a target is an FP4 instruction (older ones take BF16, or stop)
FIRST_TRITON = {"sm_100": (3, 6), "sm_103": (3, 6), "sm_120": (3, 6), "sm_121": (3, 8)}

FAST = {  # format -> (kinds, block, scale type); sm_12x has E8M0 scales of 32 under the one kind mxf4nvf4
    "nvfp4": (("mxf4nvf4",), 16, "ue4m3"),
    "mxfp4": (("mxf4", "mxf4nvf4"), 32, "ue8m0"),
}
NEAREST, STOCHASTIC = "cvt.rn.satfinite.e2m1x2.f32", "cvt.rs.satfinite.e2m1x4.f32"


@dataclass(frozen=True)
class Configuration:
    """One kernel as it is launched. ``multiplies``: the format of its FP4 operands, None for a kernel without a
    product; ``converts``: the conversion to E2M1 that it must use."""

    kernel: str
    tile: str
    target: str
    multiplies: str | None
    compile: Callable[[], Any] = field(repr=False, compare=False)
    converts: str | None = None
    scales_by: str | None = "tcgen05.cp"  # how block scales must reach tensor memory; None: either way


def triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def require(target: str) -> None:
    """Raises ValueError for a target without FP4 tensor cores or a Triton that cannot reach them."""
    if target not in TARGETS:
        raise ValueError(f"{target!r} has no FP4 tensor cores: choose from {', '.join(TARGETS)}")
    if triton_version() < FIRST_TRITON[target]:
        needed = ".".join(map(str, FIRST_TRITON[target]))
        raise ValueError(f"Triton {triton.__version__} has no FP4 product for {target}: install triton>={needed}")


def configurations(target: str) -> list[Configuration]:
    """Everything shipped for ``target``. Raises ValueError as ``require`` does."""
    require(target)
    return _matmuls(target) + _logits(target) + _quantizers(target) + _conversions(target)


def faults(found: Report, wanted: Configuration) -> list[str]:
    """Why a compiled configuration must not be shipped; empty if it may."""
    said = []
    if wanted.multiplies is not None:
        said += _product_faults(found, wanted)
    if wanted.converts is not None and wanted.converts not in found.conversions:
        said.append(f"has no {wanted.converts}, but {', '.join(found.conversions) or 'no conversion to E2M1 at all'}")
    if found.spills:
        said.append(f"spills {found.spills} bytes a thread")
    limit = SHARED_MEMORY[int(wanted.target.removeprefix("sm_"))]
    if found.shared > limit:
        said.append(f"takes {found.shared} bytes of shared memory of {limit}")
    if found.tensor_memory > TENSOR_MEMORY:
        said.append(f"takes {found.tensor_memory} columns of tensor memory of {TENSOR_MEMORY}")
    return said


def audit(wanted: Configuration) -> tuple[Report, list[str]]:
    """(what the configuration compiles to, its faults). One that does not compile has nothing but that fault."""
    try:
        found = report(wanted.compile())
    except Exception as error:  # a compiler may raise anything
        text = " ".join(str(error).split())
        return Report(wanted.target, (), 0, 0, 0, 0), [f"does not compile: {type(error).__name__}: {text[:300]}"]
    return found, faults(found, wanted)


def _product_faults(found: Report, wanted: Configuration) -> list[str]:
    if not found.mma:
        return ["has no matrix instruction at all"]
    kinds, block, scale_type = FAST[wanted.multiplies]
    said = []
    for mma in found.mma:
        if mma.kind not in kinds or mma.block != block or mma.scale_type != scale_type:
            said.append(
                f"multiplies with {mma.instruction} (scales {mma.scale_type or 'none'}), not with "
                f"{' or '.join(kinds)}, blocks of {block}, {scale_type}"
            )
        if mma.layout != "TN":
            said.append(f"is {mma.layout}, not TN: an operand is not packed along K")
        if mma.scales_by == "tcgen05.st" and wanted.scales_by is not None:
            said.append("takes its scales through registers (tcgen05.st) and waits for them at each step")
    return said


def _matmuls(target: str) -> list[Configuration]:
    from nvfp4_kernels.triton import native_matmul as native

    found = []
    for name, tile in native.TILES[int(target.removeprefix("sm_")) // 10].items():
        for format_, vector in (("nvfp4", 16), ("mxfp4", 32)):
            for out, accumulate in (("bf16", False), ("fp32", True)):

                def compile_(tile=tile, vector=vector, out=out, accumulate=accumulate):
                    signature, constexprs = native.compile_arguments(tile, vector, out, accumulate, alpha=vector == 16)
                    kernel = native.native_matmul_kernel
                    aligned = [name for name in ("out_ptr", "alpha_ptr", "out_stride") if name in signature]
                    options = dict(num_warps=tile.warps, num_stages=tile.stages, attrs=divisible(kernel, aligned))
                    return compile_for(kernel, signature, constexprs, target, **options)

                kernel = f"matmul {format_} -> {out}{' accumulated' if accumulate else ''}"
                sizes = f"{name} {tile.m}x{tile.n}x{tile.k}, {tile.warps} warps, {tile.stages} stages"
                found.append(Configuration(kernel, sizes, target, format_, compile_))
    return found


def _logits(target: str) -> list[Configuration]:
    """MQA logits of an indexer with 64 heads of 128. One step is the whole reduction: its scales need not run ahead."""
    from nvfp4_kernels.triton import mqa_scaled as mqa

    found = []
    for format_, block in VECTOR.items():

        def compile_(block=block):
            scale = "*fp8e4nv" if block == 16 else "*u8"
            signature = {"q_ptr": "*u8", "q_scales_ptr": scale, "k_ptr": "*u8", "k_scales_ptr": scale}
            signature |= dict.fromkeys(("weights_ptr", "out_ptr"), "*fp32") | dict.fromkeys(
                ("ks_ptr", "ke_ptr"), "*i32"
            )
            signature |= dict.fromkeys(("M", "N", "width", "groups", "tiles_each"), "i32")
            amax = ("q_amax_ptr", "k_amax_ptr")
            constants = dict(
                H=64, HP=64, QB=mqa.COLUMNS // 64, BN=mqa.KEYS, D=128, BLOCK=block, COMPRESSED=False, CLEAN=True,
                BF16_BITS=False, STAGES=mqa.STAGES,
            )  # fmt: skip
            if block == 16:
                signature |= dict.fromkeys(amax, "*fp32")
            else:
                constants |= dict.fromkeys(amax)
            aligned = [name for name, type_ in signature.items() if type_.startswith("*")]
            options = dict(num_warps=mqa.WARPS, num_stages=mqa.STAGES, attrs=divisible(mqa.scaled_kernel, aligned))
            return compile_for(mqa.scaled_kernel, signature, constants, target, enable_fp_fusion=True, **options)

        size = f"{mqa.KEYS} keys x {mqa.COLUMNS} columns, {mqa.WARPS} warps, {mqa.STAGES} stages"
        found.append(Configuration(f"MQA logits {format_}", size, target, format_, compile_, scales_by=None))
    return found


def _quantizers(target: str) -> list[Configuration]:
    """What a layer of the recipe nvidia_nvfp4 launches, packed as the native product reads it."""
    from nvfp4_kernels.triton import codecs_sm100, quantize
    from nvfp4_kernels.triton.quantize_kernel import quantize_kernel

    best = codecs_sm100.conversion(target)
    found = []
    for rounding in ("nearest", "stochastic", "stochastic8"):
        rows, columns = Scheme(rounding=rounding), Scheme(rounding=rounding, hadamard=16)
        cases = {"rows and rotated columns": (rows, columns)}
        if rounding == "nearest":
            cases["square blocks"] = (Scheme(block=(16, 16)), None)
        instruction = {"nearest": NEAREST, "stochastic8": STOCHASTIC if best == codecs_sm100.STOCHASTIC else None}
        for name, pair in cases.items():
            plan = quantize.planned(*pair, best)

            def compile_(pair=pair, plan=plan):
                signature, constants = quantize.compile_arguments(*pair, plan)
                aligned = [name for name, type_ in signature.items() if type_.startswith("*")]
                attrs = divisible(quantize_kernel, [*aligned, "height", "width", "stride"])
                return compile_for(
                    quantize_kernel, signature, constants, target, num_warps=plan.work.warps, attrs=attrs
                )

            size = f"{plan.work.constants['BI']}x{plan.work.constants['BJ']}, {plan.work.warps} warps"
            kernel = f"quantize {rounding}: {name}"
            found.append(Configuration(kernel, size, target, None, compile_, instruction.get(rounding)))
    return found


def _conversions(target: str) -> list[Configuration]:
    """To E2M1, by itself: what the quantize kernels convert with."""
    from nvfp4_kernels.triton import codecs_sm100 as conversions

    best = conversions.conversion(target)
    types = {"x_ptr": "*fp32", "up16_ptr": "*i16", "out_ptr": "*u8", "size": "i32"}
    found = []
    for name, rounding, instruction in (("nearest", 0, NEAREST), ("stochastic8", 2, STOCHASTIC)):
        if best == conversions.STOCHASTIC or rounding == 0:

            def compile_(rounding=rounding):
                constants = dict(ROUNDING=rounding, CONVERT=best, BLOCK=1024)
                return compile_for(conversions.convert_kernel, types, constants, target)

            found.append(Configuration(f"convert {name}", "1024", target, None, compile_, instruction))
    return found


def report_of(target: str, only: str = "") -> dict[str, Any]:
    """``{"triton", "target", "kernels": [row...], "faults": number}``, every configuration of ``target`` compiled;
    ``only``: words that kernel and tile must hold, such as "nvfp4 small", or several such groups between "|"."""
    rows = []
    for wanted in configurations(target):
        name = f"{wanted.kernel} {wanted.tile}"
        if not any(all(word in name for word in group.split()) for group in only.split("|")):
            continue
        found, said = audit(wanted)
        mma = [{**vars(item), "family": item.family, "speed": item.speed} for item in found.mma]
        rows.append({
            "kernel": wanted.kernel, "tile": wanted.tile, "mma": mma, "conversions": list(found.conversions),
            "machine_code": list(found.machine_code),
            "registers": found.registers, "spills": found.spills, "shared": found.shared,
            "tensor_memory": found.tensor_memory, "faults": said,
        })  # fmt: skip
    faulty = sum(bool(row["faults"]) for row in rows)
    return {"triton": triton.__version__, "target": target, "kernels": rows, "faults": faulty}


def main() -> int:
    try:
        print(json.dumps(report_of(*sys.argv[1:])))
    except ValueError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
