"""Bandwidth of the quantize, amax and decode kernels: bytes really read and written over the copy rate of the same run.

    python experiments/kernels/bench_quantize.py [--sweep] [--case NAME] [--tile 16,128,1,4,128,4 ...] [--json FILE]

Each time is the median of replays of a CUDA graph. ``--sweep`` tries every tile in CANDIDATES and prints the best: its
choice belongs into kernels/triton/tiles.py. ``--tile`` tries those given, in the order of ``Tile``'s fields.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import amax, decode, launch, tiles
from nvfp4_kernels.triton import quantize as kernels
from nvfp4_kernels.triton.tiles import Tile

SR = "stochastic"
ROTATED = Scheme(hadamard=16)
CASES = {  # name -> (kind in tiles.TABLE, rows, form, columns, form)
    "1x16 decoded": ("rows", Scheme(), "decoded", None, ""),
    "1x16 packed": ("rows", Scheme(), "packed", None, ""),
    "1x16 SR decoded": ("rows", Scheme(rounding=SR), "decoded", None, ""),
    "16x16 decoded": ("square", Scheme(block=(16, 16)), "decoded", None, ""),
    "16x16 both": ("square", Scheme(block=(16, 16)), "both", None, ""),
    "rows + columns H, SR, decoded": (
        "columns_stochastic", Scheme(rounding=SR), "decoded", Scheme(rounding=SR, hadamard=16), "decoded",
    ),
    "rows decoded + columns H packed": ("columns_packed", Scheme(), "decoded", ROTATED, "packed"),
    "columns H, SR, decoded": ("columns_stochastic", None, "", Scheme(rounding=SR, hadamard=16), "decoded"),
    "rows + columns, decoded": ("columns", Scheme(), "decoded", Scheme(), "decoded"),
    "amax": ("amax", Scheme(), "", None, ""),
    "amax plain + H": ("amax_rotated", Scheme(), "", ROTATED, ""),
    "decode rows": ("decode", Scheme(), "", None, ""),
    "decode columns": ("decode", None, "", Scheme(), ""),
    "decode 16x16": ("decode", Scheme(block=(16, 16)), "", None, ""),
}  # fmt: skip
FLAT = [Tile(16, 256, 4), Tile(16, 128, 2), Tile(16, 256, 2), Tile(16, 128, 1), Tile(16, 512, 4)]
DEEP = [Tile(16, 256, 1), Tile(16, 128, 1, 4), Tile(16, 128, 1, 4, 168), Tile(16, 128, 1, 4, 128),
        Tile(16, 256, 2, 4, 128), Tile(16, 128, 1, 4, 96)]  # fmt: skip
CANDIDATES = {
    "rows": FLAT, "square": FLAT, "columns": DEEP, "columns_stochastic": DEEP, "columns_packed": DEEP,
    "amax": [Tile(16, 1024, 4), Tile(16, 512, 2), Tile(16, 256, 1)],
    "amax_rotated": [Tile(16, 512, 2), Tile(16, 1024, 4), Tile(16, 256, 1)],
    "decode": [Tile(16, 512, 4), Tile(16, 256, 4), Tile(16, 512, 8), Tile(16, 256, 2)],
}  # fmt: skip


def prepare(name: str, x: torch.Tensor):
    """(function to time, bytes it must read and write)."""
    kind, rows, rows_form, columns, columns_form = CASES[name]
    count, size = x.numel(), x.element_size()
    if kind.startswith("amax"):
        return (lambda: kernels.global_amax(x, rows, columns)), count * size
    amax = kernels.global_amax(x, rows, columns)
    seed = torch.tensor(1, device=x.device)
    packed = {"": 0, "decoded": 0, "packed": 1, "both": 1}
    if kind == "decode":
        scheme = rows or columns
        q = kernels.quantize(x, rows, columns)[0 if rows else 1]
        bytes_ = count * 2 + q.codes.numel() + q.scales.numel()
        return (lambda: kernels.decode(q.codes, q.scales, scheme, 2 * q.codes.shape[1])), bytes_
    moved = count * size
    for scheme, form in ((rows, rows_form), (columns, columns_form)):
        if scheme is not None:
            blocks = count // (scheme.block[0] * scheme.block[1])
            moved += (count // 2 + blocks) * packed[form] + (2 * count if form in ("decoded", "both") else 0)
    options = dict(
        amax_rows=amax[0], amax_columns=amax[1], seed=seed, column_stream=0,
        rows_form=rows_form or "packed", columns_form=columns_form or "packed",
    )  # fmt: skip
    return (lambda: kernels.quantize(x, rows, columns, **options)), moved


def median_ms(function, replays: int = 7) -> float:
    """Median of replays of a graph of ``inner`` calls, per call: no launch gaps."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    inner = 8
    with torch.cuda.graph(graph):
        for _ in range(inner):
            function()
    times = []
    for index in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if index:
            times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def compile_only(job: tuple) -> str:
    """In a process of its own: fills Triton's cache on disk."""
    name, tile, programs = job
    try:
        kind = CASES[name][0]
        tiles.TABLE[kind] = tile
        prepare(name, torch.randn(1024, 4096, device="cuda").bfloat16())[0]()
        torch.cuda.synchronize()
        return ""
    except Exception as fault:
        return f"{name} {tile}: {fault!r}"[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--case", default="")
    parser.add_argument("--tile", nargs="*", default=[], type=lambda text: Tile(*(int(n) for n in text.split(","))))
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = []
    for name in CASES:
        if arguments.case in name:
            kind = CASES[name][0]
            for tile in arguments.tile or (CANDIDATES[kind] if arguments.sweep else [tiles.TABLE[kind]]):
                for programs in (4, 8, 16, 32, 64) if arguments.sweep and kind.startswith("amax") else (None,):
                    jobs.append((name, tile, programs))
    begin = time.time()
    context = multiprocessing.get_context("spawn")
    unique = list(dict.fromkeys((name, tile, None) for name, tile, _ in jobs))
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for fault in filter(None, pool.map(compile_only, unique)):
            print("FAULT", fault, flush=True)
    print(f"compiled {len(unique)} in {time.time() - begin:.0f} s", flush=True)

    x = torch.randn(arguments.rows, arguments.columns, device="cuda").bfloat16()
    y = torch.empty_like(x)
    copy = lambda: median_ms(lambda: y.copy_(x))  # noqa: E731
    copy_rate = 2 * x.numel() * x.element_size() / copy()  # bytes a ms
    results = []
    for name, tile, programs in jobs:
        tiles.TABLE[CASES[name][0]] = tile
        for cache in (kernels._plan, amax._work, decode._work):
            cache.cache_clear()
        launch._compiled.clear()
        if programs:
            tiles.AMAX_PROGRAMS[CASES[name][0]] = 132 * programs
        try:
            function, moved = prepare(name, x)
            ms = median_ms(function)
        except Exception as fault:
            print("FAULT", name, tile, repr(fault)[:200], flush=True)
            continue
        row = {"case": name, "tile": tuple(tile), "programs": programs, "ms": ms, "bytes": moved,
               "TB/s": moved / ms / 1e9, "of copy": moved / ms / copy_rate}  # fmt: skip
        results.append(row)
        print(f"{name:34} {str(tuple(tile)):20} {programs or '':>4} {ms:8.4f} ms {row['TB/s']:6.2f} TB/s "
              f"{100 * row['of copy']:6.1f} % of copy", flush=True)  # fmt: skip
    again = 2 * x.numel() * x.element_size() / copy()
    print(f"copy {copy_rate / 1e9:.2f} TB/s before, {again / 1e9:.2f} after; {time.time() - begin:.0f} s in all")
    if arguments.sweep:
        for name in dict.fromkeys(row["case"] for row in results):
            best = max((row for row in results if row["case"] == name), key=lambda row: row["of copy"])
            print(f"BEST {name:34} {best['tile']} {best['programs'] or ''} {100 * best['of copy']:.1f} %")
    if arguments.json:
        host = {}
        small = torch.randn(256, 512, device="cuda").bfloat16()
        for name in ("1x16 decoded", "rows + columns H, SR, decoded", "amax"):
            if arguments.case in name:
                function, _ = prepare(name, small)
                function()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):
                    function()
                host[name] = (time.perf_counter() - start) / 200 * 1e6
                torch.cuda.synchronize()
        print("host microseconds a call:", {key: round(value, 1) for key, value in host.items()})
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"shape": [arguments.rows, arguments.columns], "copy TB/s": [copy_rate / 1e9, again / 1e9]}
        record |= {"host microseconds a call": host, "rows": results}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
