"""Triton against the reference, bit by bit, on a GPU (or in the interpreter): every form, rounding, shape, dtype.

    python experiments/kernels/compare.py [--jobs 12] [--json FILE]

Prints one line for each case with the number of values compared and of those that differ; exits with 1 if any does.
The reference runs on the CPU. NaN equals NaN whatever its payload.
"""

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path

import torch

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import quantize as kernels

SR, SR8 = "stochastic", "stochastic8"
FLOOR = dict(scale="e8m0", rule="floor", block=(1, 32))
CEIL = dict(scale="e8m0", rule="ceil", block=(1, 32))
SQUARE = (16, 16)
SCHEMES = {  # name -> rows, rows_form, columns, columns_form, column stream (the row stream is 0)
    "1x16 both forms": (Scheme(), "both", Scheme(), "both", 0),
    "16x16 both forms": (Scheme(block=SQUARE), "both", Scheme(block=SQUARE), "both", 0),
    "forward: rows decoded, columns H packed": (Scheme(), "decoded", Scheme(hadamard=16), "packed", 0),
    "backward: SR decoded, one draw": (Scheme(rounding=SR), "decoded", Scheme(rounding=SR, hadamard=16), "decoded", 0),
    "SR both, two draws": (Scheme(rounding=SR), "both", Scheme(rounding=SR, hadamard=16), "both", 7),
    "SR8: H rows decoded, 16x16 packed": (
        Scheme(rounding=SR8, hadamard=16), "decoded", Scheme(rounding=SR8, block=SQUARE), "packed", 0,
    ),
    "H rows packed, SR8 columns decoded": (Scheme(hadamard=16), "packed", Scheme(rounding=SR8), "decoded", 3),
    "MX floor, MX ceil SR": (Scheme(**FLOOR), "both", Scheme(rounding=SR, **CEIL), "decoded", 1),
    "MX ceil, MX floor H SR8": (Scheme(**CEIL), "both", Scheme(rounding=SR8, hadamard=16, **FLOOR), "both", 1),
    "columns only, H SR packed": (None, "packed", Scheme(rounding=SR, hadamard=16), "packed", 2),
}  # fmt: skip


def make(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 7919 + shape[1])
    x = torch.randn(shape, generator=generator)
    if kind == "wide":  # block scales reach E4M3's subnormals and zero
        x *= torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    elif kind == "ties":
        x = torch.randint(-24, 25, shape, generator=generator) / 4.0
        x[0, 0] = 6.0
    elif kind == "tiny":
        x *= 1e-37
    elif kind == "subnormal":
        x *= 1e-39
    elif kind == "huge":
        x = x.clamp(-4, 4) * 7e37
    elif kind == "zeros":
        x = torch.zeros(shape) * x.sign()  # both signs of zero
    elif kind in ("nan", "inf"):
        x[shape[0] // 2, shape[1] // 3] = float(kind)
    return x.to(dtype)


def cases() -> list[tuple]:
    bf16 = torch.bfloat16
    shapes = ((512, 2048), (1000, 520), (333, 250), (5, 7))
    rows = [(name, shape, bf16, "normal") for name in SCHEMES for shape in shapes]
    others = [(shape, dtype) for shape in ((512, 1024), (333, 250)) for dtype in (torch.float32, torch.float16)]
    rows += [(name, shape, dtype, "normal") for name in list(SCHEMES)[:5] for shape, dtype in others]
    special = ("wide", "ties", "tiny", "subnormal", "huge", "zeros", "nan", "inf")
    rows += [(name, (96, 160), bf16, kind) for name in SCHEMES for kind in special]
    extremes = ("wide", "tiny", "subnormal")
    rows += [(name, (96, 160), torch.float32, kind) for name in list(SCHEMES)[:4] for kind in extremes]
    return rows


def differing(expected: torch.Tensor | None, found: torch.Tensor | None) -> tuple[int, int]:
    """(values, values that differ)."""
    if expected is None or found is None:
        assert expected is None and found is None, "one of them is None"
        return 0, 0
    found = found.cpu()
    assert expected.shape == found.shape and expected.dtype == found.dtype, (expected.shape, found.shape)
    if not expected.is_floating_point():
        return expected.numel(), int((expected != found).sum())
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[expected.dtype]
    differ = expected.contiguous().view(bits) != found.contiguous().view(bits)
    return expected.numel(), int((differ & ~(expected.isnan() & found.isnan())).sum())


def compare(case: tuple, device: str) -> dict:
    name, shape, dtype, kind = case
    rows, rows_form, columns, columns_form, stream = SCHEMES[name]
    x = make(kind, shape, dtype)
    on_device = x.to(device)
    seed = torch.tensor(2**40 + 12345)
    options = dict(column_stream=stream, rows_form=rows_form, columns_form=columns_form)
    row = {"case": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "input": kind}
    counts = {}
    amax = reference.global_amax(x, rows, columns)
    amax_found = kernels.global_amax(on_device, rows, columns)
    counts["amax"] = [differing(a, b) for a, b in zip(amax, amax_found, strict=True)]
    expected = reference.quantize(x, rows, columns, amax_rows=amax[0], amax_columns=amax[1], seed=seed, **options)
    found = kernels.quantize(
        on_device, rows, columns, amax_rows=amax_found[0], amax_columns=amax_found[1], seed=seed.to(device), **options
    )
    for scheme, want, got in zip((rows, columns), expected, found, strict=True):
        if want is None:
            continue
        for field in want._fields:
            counts.setdefault(field, []).append(differing(getattr(want, field), getattr(got, field)))
        if want.codes is not None:
            width = want.operand.shape[1] if want.operand is not None else 2 * want.codes.shape[1]
            decoded = kernels.decode(got.codes, got.scales, scheme, width)
            counts.setdefault("decode", []).append(
                differing(reference.decode(want.codes, want.scales, scheme, width), decoded)
            )
    row["compared"] = sum(n for pairs in counts.values() for n, _ in pairs)
    row["differ"] = {key: sum(d for _, d in pairs) for key, pairs in counts.items()}
    return row


def compare_views(device: str) -> dict:
    """Strides: a slice, a transposed view, rows that are not aligned to 16 bytes."""
    differ = 0
    base = make("normal", (300, 500), torch.bfloat16)
    scheme = Scheme(rounding=SR)
    seed = torch.tensor(5)
    for view in (lambda t: t[3:259, 5:389], lambda t: t.T, lambda t: t[::2], lambda t: t[:, ::3], lambda t: t[:1]):
        want = reference.quantize(view(base), scheme, scheme, seed=seed, rows_form="both", columns_form="both")
        got = kernels.quantize(
            view(base.to(device)), scheme, scheme, seed=seed.to(device), rows_form="both", columns_form="both"
        )
        differ += sum(differing(a, b)[1] for w, g in zip(want, got, strict=True) for a, b in zip(w, g, strict=True))
    return {"case": "views", "shape": [300, 500], "dtype": "bfloat16", "input": "normal", "differ": {"all": differ}}


def compare_large(device: str) -> dict:
    """More than 2^31 elements: the last rows must equal the same rows quantized alone."""
    height, width = 2**20 + 48, 2064
    x = torch.empty(height, width, dtype=torch.bfloat16, device=device).normal_()
    scheme = Scheme()
    amax, amax_columns = kernels.global_amax(x, scheme, Scheme(hadamard=16))
    rows, columns = kernels.quantize(x, scheme, Scheme(hadamard=16), amax_rows=amax, amax_columns=amax_columns)
    tail = x[-64:].cpu()
    want_rows, want_columns = reference.quantize(
        tail, scheme, Scheme(hadamard=16), amax_rows=amax.cpu(), amax_columns=amax_columns.cpu()
    )
    differ = {
        "amax": int(amax != x.abs().amax().float()),
        "codes": differing(want_rows.codes, rows.codes[-64:])[1],
        "column codes": differing(want_columns.codes, columns.codes[:, -32:])[1],
        "scales": differing(want_rows.scales, rows.scales[-64:])[1],
    }
    decoded = kernels.decode(columns.codes, columns.scales, Scheme(hadamard=16), height)
    want = reference.decode(want_columns.codes, want_columns.scales, Scheme(hadamard=16), 64)
    differ["decode"] = differing(want.contiguous(), decoded[:, -64:].contiguous())[1]
    return {"case": "2^31", "shape": [height, width], "dtype": "bfloat16", "input": "normal", "differ": differ}


def compare_reciprocal(device: str) -> dict:
    """codecs.reciprocal against a true division: every mantissa, at several exponents."""
    import triton
    import triton.language as tl

    from nvfp4_kernels.triton import codecs

    global reciprocal_kernel

    @triton.jit
    def reciprocal_kernel(x, out, N: tl.constexpr):
        offsets = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(out + offsets, codecs.reciprocal(tl.load(x + offsets)))

    reciprocal_kernel.fn.__globals__.update(codecs=codecs, tl=tl)
    differ = 0
    mantissas = torch.arange(2**23, dtype=torch.int32, device=device)
    for exponent in (1, 60, 127, 128, 200, 250, 251):
        x = (mantissas | (exponent << 23)).view(torch.float32)
        out = torch.empty_like(x)
        reciprocal_kernel[(2**13,)](x, out, 1024)
        exact = (1.0 / x.double()).float()  # 53 bits hold a float32 reciprocal's rounding: its ties cannot occur
        differ += int((out.view(torch.int32) != exact.view(torch.int32)).sum())
    return {"case": "reciprocal", "shape": [7, 2**23], "dtype": "float32", "input": "all", "differ": {"all": differ}}


def work(job: tuple) -> dict:
    kind, argument, device = job
    torch.set_num_threads(1)
    try:
        start = time.time()
        row = compare(argument, device) if kind == "case" else globals()[kind](device)
        return row | {"seconds": round(time.time() - start, 1)}
    except Exception:
        return {"case": str(argument or kind), "shape": [], "dtype": "", "input": "", "differ": {"error": 1},
                "error": traceback.format_exc()[-1500:]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = [("case", case, arguments.device) for case in cases()] + [("compare_views", None, arguments.device)]
    if arguments.device != "cpu":
        jobs += [(name, None, arguments.device) for name in ("compare_reciprocal", "compare_large")]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        rows = pool.map(work, jobs, chunksize=1)
    failed = 0
    print(f"{'case':42} {'shape':>16} {'dtype':9} {'input':10} {'compared':>10}  differ")
    for row in rows:
        wrong = sum(row["differ"].values())
        failed += wrong > 0
        shape = "x".join(map(str, row["shape"]))
        text = ", ".join(f"{key} {count}" for key, count in row["differ"].items() if count) or "0"
        name, dtype, count = row["case"][:42], row["dtype"], row.get("compared", 0)
        print(f"{name:42} {shape:>16} {dtype:9} {row['input']:10} {count:>10}  {text}")
        if "error" in row:
            print(row["error"])
    total = sum(row.get("compared", 0) for row in rows)
    print(f"{len(rows)} cases, {total} values compared, {failed} cases differ")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
