"""Compiles the quantize, amax and decode kernels for every target, without a GPU, and reads what came out.

    python experiments/kernels/compile_targets.py [--arch 90] [--case NAME] [--dump FOLDER]

Per kernel and target: instructions, registers, bytes of stack (spills), shared memory (a conversion between layouts
went through it), 16-byte loads and stores, divisions. Exits with 1 if a kernel divides approximately. The reciprocals
that start from an approximation are rounded by a Newton step (codecs.reciprocal; compare.py tries every mantissa).
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import amax, codecs_sm100, decode, quantize, quantize_kernel, tiles

ARCHS = (80, 89, 90, 100, 120)
SR = "stochastic"
POINTERS = {"x_ptr": "*i16", "seed_ptr": "*i64"}
INTEGERS = ("height", "width", "stride", "strips", "row_stream", "column_stream", "draw_i", "draw_j", "draw_width")
CASES = {  # name -> (rows, rows_form, columns, columns_form)
    "rows nearest decoded": (Scheme(), "decoded", None, ""),
    "rows nearest packed": (Scheme(), "packed", None, ""),
    "square nearest decoded": (Scheme(block=(16, 16)), "decoded", None, ""),
    "square nearest both": (Scheme(block=(16, 16)), "both", None, ""),
    "rows nearest decoded + columns hadamard packed": (Scheme(), "decoded", Scheme(hadamard=16), "packed"),
    "rows + columns hadamard, stochastic, decoded": (
        Scheme(rounding=SR), "decoded", Scheme(rounding=SR, hadamard=16), "decoded",
    ),
    "rows hadamard stochastic8 packed + MX columns": (
        Scheme(rounding="stochastic8", hadamard=16), "packed",
        Scheme(rounding=SR, scale="e8m0", rule="ceil", block=(1, 32)), "both",
    ),
}  # fmt: skip


def compile_kernel(kernel, types: dict, values: dict, arch: int, warps: int, registers: int = 0):
    """``types``: run-time argument -> type, divisible by 16; ``values``: constexpr arguments."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in values.items()}
    unaligned = ("strips", "stream", "draw")
    divisible = [name for name in types if not any(part in name for part in unaligned)]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": warps, "enable_fp_fusion": False} | ({"maxnreg": registers} if registers else {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def quantize_case(name: str, arch: int, tile: tiles.Tile | None = None, even: bool = True):
    rows, rows_form, columns, columns_form = CASES[name]
    needed = max(rows.block[0] if rows else 1, columns.group if columns else 1)
    tile = tile or tiles.fit(quantize._kind(rows, columns, columns_form != "decoded"), 8192, 8192, needed)
    types = {"x_ptr": "*i16"} | dict.fromkeys(INTEGERS, "i32")
    stochastic = any(s is not None and s.stochastic for s in (rows, columns))
    values = {} if stochastic else {"seed_ptr": None}
    if stochastic:
        types["seed_ptr"] = "*i64"
    for prefix, scheme, form in (("row", rows, rows_form), ("column", columns, columns_form)):
        wanted = {"amax": "*fp32"} if scheme else {}
        wanted |= {"codes": "*u8", "scales": "*u8"} if form in ("packed", "both") else {}
        wanted |= {"operand": "*i16"} if form in ("decoded", "both") else {}
        for output in ("amax", "codes", "scales", "operand"):
            if output in wanted:
                types[f"{prefix}_{output}"] = wanted[output]
            else:
                values[f"{prefix}_{output}"] = None
    values |= quantize._constants("ROW", rows, True) | quantize._constants("COLUMN", columns, False)
    both = rows is not None and columns is not None
    values |= dict(BF16_BITS=True, EVEN=even, BI=tile.rows, BJ=tile.columns, BY_EIGHTS=True, ONE_DRAW=both)
    values |= dict(ROW_VECTOR=8, COLUMN_VECTOR=tile.vector or 8, CONVERT=codecs_sm100.conversion(f"sm_{arch}"))
    values |= dict(XORSIGN=arch >= 86, AHEAD=tile.ahead)
    return compile_kernel(quantize_kernel.quantize_kernel, types, values, arch, tile.warps, tile.registers)


def amax_case(rotated: bool, arch: int):
    tile = tiles.TABLE["amax_rotated" if rotated else "amax"]
    types = {"x_ptr": "*i16", "out": "*i32", "height": "i32", "width": "i32", "stride": "i32", "strips": "i32"}
    values = dict(
        BF16_BITS=True, EVEN=True, BI=tile.rows, BJ=tile.columns, PLAIN=True, ROW_N=0, ROW_MASK=0, ROW_FACTOR=1.0,
        COLUMN_N=16 if rotated else 0, COLUMN_MASK=0xD7E8, COLUMN_FACTOR=0.25, XORSIGN=arch >= 86,
    )  # fmt: skip
    return compile_kernel(amax.amax_kernel, types, values, arch, tile.warps)


def decode_case(along_rows: bool, arch: int):
    tile = tiles.TABLE["decode"]
    names = ("height", "width", "codes_height", "codes_width", "scales_i")
    types = {"codes_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*i16"} | dict.fromkeys(names, "i32")
    values = dict(
        scales_j=1, ALONG_ROWS=along_rows, E4M3=True, BR=1 if along_rows else 16, BC=16 if along_rows else 1,
        EVEN=True, BI=tile.rows, BJ=tile.columns,
    )  # fmt: skip
    return compile_kernel(decode.decode_kernel, types, values, arch, tile.warps)


def all_cases() -> dict:
    jobs = {name: (lambda arch, name=name: quantize_case(name, arch)) for name in CASES}
    jobs["ragged: " + list(CASES)[0]] = lambda arch: quantize_case(list(CASES)[0], arch, even=False)
    jobs |= {"amax": lambda arch: amax_case(False, arch), "amax + rotated": lambda arch: amax_case(True, arch)}
    jobs["decode rows"] = lambda arch: decode_case(True, arch)
    jobs["decode columns"] = lambda arch: decode_case(False, arch)
    return jobs


def read(compiled, folder: Path | None, label: str) -> dict:
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path("/tmp") / f"kernel_{label.replace(' ', '_').replace(':', '')}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
    sass = subprocess.run([cuobjdump, "--dump-sass", cubin], capture_output=True, text=True).stdout
    cubin.unlink()
    if folder:
        for kind, text in (("ptx", ptx), ("ttgir", ttgir), ("sass", sass)):
            (folder / f"{label.replace(' ', '_')}.{kind}").write_text(text)

    def count(pattern: str, text: str = ptx) -> int:
        return len(re.findall(pattern, text))

    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return {
        "sass": count(r"/\*[0-9a-f]{4,5}\*/", sass),
        "reg": found.get("REG"),
        "stack": found.get("STACK", 0) + found.get("LOCAL", 0),
        "smem": compiled.metadata.shared,
        "ld16": count(r"ld\.global[\w.:]*\.v4\.b32"),
        "st16": count(r"st\.global[\w.:]*\.v4\.b32"),
        "converts": count(r"ttg\.convert_layout", ttgir),
        "div.rn": count(r"(div|rcp)\.rn\.f32"),
        "approx": count(r"div\.(approx|full)"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHS)
    parser.add_argument("--case", default="")
    parser.add_argument("--dump", type=Path)
    arguments = parser.parse_args()
    faults = 0
    for name, job in all_cases().items():
        for arch in arguments.arch if arguments.case in name else ():
            row = read(job(arch), arguments.dump, f"{name} sm{arch}")
            faults += bool(row["approx"])
            print(f"sm_{arch:<4} {name:50}", *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
