"""Times and checks kernels/cublas.py and its two rivals against torch.mm on one GPU; on a CPU only the checks.

    python experiments/2026-11-30_kernels/bench_gemm.py [--large] [--small] [--check] [--tiles] [--out FOLDER]

Every GEMM of a linear layer, in the layout that layer gives it: Fprop (both K-major), Dgrad (b N-major), Wgrad (both
transposed). Times are medians of ``do_bench`` in milliseconds; the ratio is to torch.mm with BF16 output.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import torch

CPU = not torch.cuda.is_available()
if CPU:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton_gemm as gemm  # noqa: E402
from triton_gemm import Config  # noqa: E402

from nvfp4_kernels import cublas  # noqa: E402

DEVICE = "cpu" if CPU else "cuda"
LARGE = [(8192, 8192, 8192), (16384, 4096, 4096), (16384, 4096, 14336)]  # tokens, in, out
SMALL = [(65536, 384, 384), (65536, 384, 1024), (65536, 1024, 384), (65536, 1024, 1024), (8192, 1024, 4096)]
TILES = {
    "256/3": Config(),
    "256/3s": Config(subtiles=2),
    "256/4s": Config(subtiles=2, num_stages=4),
    "256/4s-nf": Config(subtiles=2, num_stages=4, flatten=False),
    "256/4s-g16": Config(subtiles=2, num_stages=4, group=16),
    "m256/4s": Config(256, 128, subtiles=2, num_stages=4),
    "128/4w8": Config(128, 128, num_stages=4),
    "128/5w4": Config(128, 128, num_stages=5, num_warps=4),
    "128/4k128": Config(128, 128, 128, num_stages=3),
    "n64/4": Config(128, 64, num_stages=4, num_warps=4),
    "64/4": Config(64, 64, num_stages=4, num_warps=4),
}


def layouts(tokens: int, inputs: int, outputs: int):
    """name, a [M, K], b [N, K], out_dtype of the three GEMMs of one layer."""
    x, w, dy = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    yield "fprop", x, w, torch.bfloat16
    yield "dgrad", dy, w.T, torch.bfloat16
    yield "wgrad", dy.T, x.T, torch.bfloat16
    yield "wgrad f32", dy.T, x.T, torch.float32


def bench(run) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")


def candidates(a, b, alpha, out, tiles: dict) -> dict:
    """label -> a call that computes the product, scaled; ``+=`` labels add to ``out`` instead of writing it."""
    float32 = out.dtype == torch.float32
    runs = {
        "chosen": lambda: gemm.scaled_matmul(a, b, alpha, out_dtype=out.dtype),
        "library": lambda: gemm._library(a, b, alpha, out, False),
    }
    if gemm_ex_runs():
        runs["gemmex"] = lambda: gemm_ex(a, b, alpha, out)
        if float32:
            runs["gemmex+="] = lambda: gemm_ex(a, b, alpha, out, True)
    if float32:
        runs["chosen+="] = lambda: gemm.scaled_matmul(a, b, alpha, out_dtype=out.dtype, out=out, accumulate=True)
    for label, tile in tiles.items() if not float32 else ():
        runs[label] = lambda tile=tile: gemm._persistent(a, b, alpha, out, False, tile)
    return runs


def times(shapes, tiles: dict) -> list[dict]:
    alpha = torch.tensor(0.37, device=DEVICE)
    rows = []
    for shape in shapes:
        for name, a, b, dtype in layouts(*shape):
            m, n, k = a.shape[0], b.shape[0], a.shape[1]
            out = torch.empty((m, n), dtype=dtype, device=DEVICE)
            cublas = bench(partial(torch.mm, a, b.T))
            row = {"layer": shape, "gemm": name, "mnk": (m, n, k), "cublas": cublas}
            runs = candidates(a, b, alpha, out, tiles)
            for label, run in runs.items():
                try:
                    row[label] = bench(run) / cublas
                except Exception as error:  # a tile that does not fit is a result, not the end of the table
                    row[label] = type(error).__name__
            row["config"] = str(gemm.route(a, b, out))
            rows.append(row)
            text = "  ".join(
                f"{key} {row[key]:.3f}" if row[key] != str(row[key]) else f"{key} {row[key]}" for key in runs
            )
            print(f"{name:10}{m:6}x{n:5}x{k:5} {cublas:7.4f}ms {2e-9 * m * n * k / cublas:4.0f}TF  {text}", flush=True)
    return rows


def checks(shapes) -> bool:
    """Exact sums must agree bitwise with float64; random ones to float32 accuracy; every path and layout."""
    torch.manual_seed(int(time.time()))
    good = True
    for m, n, k in shapes:
        for a_turned in (False, True):
            for b_turned in (False, True):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    good &= check_one(m, n, k, a_turned, b_turned, dtype)
    print("checks", "all bitwise equal" if good else "FAILED", flush=True)
    return good


def check_one(m, n, k, a_turned, b_turned, dtype) -> bool:
    def operand(rows, turned):
        # integers of up to 6 bits: products below 2^12, sums of 4096 of them below 2^24
        shape = (k, rows) if turned else (rows, k)
        x = torch.randint(-63, 64, shape, device=DEVICE).to(torch.bfloat16)
        return x.T if turned else x

    a, b = operand(m, a_turned), operand(n, b_turned)
    alpha = torch.rand((), device=DEVICE) * 0.01
    exact = (a.double() @ b.double().T).float()
    wanted = (exact * alpha).to(dtype)
    routes = {"chosen": lambda out: gemm.scaled_matmul(a, b, alpha, out_dtype=dtype, out=out)}
    if not CPU:
        routes["library"] = lambda out: gemm._library(a, b, alpha, out, False)
        if gemm_ex_runs() and dtype != torch.float16:  # cuBLAS has no BF16 x BF16 -> FP16
            routes["gemmex"] = lambda out: gemm_ex(a, b, alpha, out)
    good = True
    for label, run in routes.items():
        out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
        written = run(out)
        out = out if written is None else written
        if not torch.equal(out, wanted):
            wrong = (out != wanted).sum().item()
            print(f"{label} {m}x{n}x{k} {a_turned} {b_turned} {dtype}: {wrong} of {m * n} differ", flush=True)
            good = False
    if dtype == torch.float32:
        start = torch.randn((m, n), device=DEVICE)
        out = gemm.scaled_matmul(a, b, alpha, out_dtype=dtype, out=start.clone(), accumulate=True)
        wanted = start + exact * alpha
        close = torch.allclose(out, wanted, rtol=2e-7, atol=1e-5)
        equal = torch.equal(out, wanted)
        if not equal:
            print(f"accumulate {m}x{n}x{k}: not bitwise (fused multiply-add), close {close}", flush=True)
        good &= close
    return good


def random_error(m, n, k) -> None:
    """Relative error against float64 on Gaussian operands: the order and width of the sums."""
    a, b = (torch.randn((rows, k), device=DEVICE, dtype=torch.bfloat16) for rows in (m, n))
    exact = a.double() @ b.double().T
    one = torch.ones((), device=DEVICE)
    results = {"triton": gemm._persistent(a, b, one, torch.empty((m, n), device=DEVICE), False, Config(subtiles=2))}
    results["library"] = gemm._library(a, b, one, torch.empty((m, n), device=DEVICE), False)
    if gemm_ex_runs():
        results["gemmex"] = gemm_ex(a, b, one, torch.empty((m, n), device=DEVICE))
    for label, result in results.items():
        print(f"error {label} {m}x{n}x{k} {((result - exact).norm() / exact.norm()).item():.2e}", flush=True)


def host_overhead() -> None:
    """Microseconds of host time a call, on operands too small to fill the queue."""
    a, b = (torch.randn((256, 256), device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    alpha, out = torch.ones((), device=DEVICE), torch.empty((256, 256), device=DEVICE, dtype=torch.bfloat16)
    tile = Config(128, 128, num_stages=4)
    runs = {
        "torch.mm": lambda: torch.mm(a, b.T),
        "persistent": lambda: gemm._persistent(a, b, alpha, out, False, tile),
        "scaled_matmul": lambda: gemm.scaled_matmul(a, b, alpha),
        "library": lambda: gemm._library(a, b, alpha, out, False),
    }
    if gemm_ex_runs():
        runs["gemmex"] = lambda: gemm_ex(a, b, alpha, out)
    for label, run in runs.items():
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(200):
            run()
        spent = time.perf_counter() - before
        torch.cuda.synchronize()
        print(f"host {label:14} {spent / 200 * 1e6:6.1f} us", flush=True)


def gemm_ex(a, b, alpha, out, accumulate=False):
    """kernels/cublas.py; ``out`` is only taken for its dtype unless it is added to."""
    return cublas.scaled_matmul(a, b, alpha, out.dtype, out if accumulate else None)


def gemm_ex_runs() -> bool:
    return cublas.available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("large", "small", "check", "tiles"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if CPU:
        checks([(48, 40, 64), (17, 9, 33)])
        return
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    if not gemm_ex_runs():
        print("cublasGemmEx through ctypes cannot run here: left out", flush=True)
    tiles = TILES if options.tiles else {}
    rows = []
    if options.check:
        checks([(512, 384, 1024), (1000, 520, 72), (384, 1024, 4096), (131, 77, 33), (4096, 4096, 512), (264, 8, 8)])
        random_error(2048, 2048, 8192)
        host_overhead()
    if options.small:
        rows += times(SMALL, {k: v for k, v in tiles.items() if k[0] in "1n6" or k == "256/4s"})
    if options.large:
        rows += times(LARGE, {k: v for k, v in tiles.items() if k[0] in "2m" or k == "128/4w8"})
    if options.out:
        (options.out / "gemm.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
