"""MQA logits on a GPU: right?, how fast?, and which tile? Needs torch and triton only (nvfp4_kernels on the path).

    python experiments/kernels/mqa_sweep.py [--warm I/N] [--only WORD] [--out FOLDER]

``--warm I/N`` only compiles every N-th variant: run N of them at a time first, they share Triton's cache.
"""

import argparse
import functools
import json
import statistics
import traceback
from pathlib import Path

import torch
import triton

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_kernels.reference.quantize import global_amax, quantize
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import mqa_dense, mqa_expand, mqa_hopper, mqa_hopper_direct

MX = Scheme(scale="e8m0", rule="ceil", block=(1, 32))
NV = Scheme()
H, D = 64, 128
PREFILL = {"2048x8192": (2048, 8192), "4096x32768": (4096, 32768), "8192x65536": (8192, 65536)}
TARGET = {"2048x8192": 255, "4096x32768": 1936, "8192x65536": 8526}


def quantized(x: torch.Tensor, scheme: Scheme) -> Quantized:
    amax = global_amax(x, scheme, None)[0]
    return quantize(x, scheme, None, amax_rows=amax, rows_form="packed")[0]


@functools.cache
def case(m: int, n: int, heads: int = H, dim: int = D, scheme: Scheme = MX):
    make = torch.Generator("cuda").manual_seed(m * 7 + n)
    draw = lambda *s: torch.randn(*s, generator=make, device="cuda")  # noqa: E731
    q, k, w = draw(m, heads, dim), draw(n, dim), draw(m, heads)
    return quantized(q.view(-1, dim), scheme), quantized(k, scheme), w


def ranges(m: int, n: int, causal: bool):
    ks = torch.zeros(m, dtype=torch.int32, device="cuda")
    ke = torch.full_like(ks, n)
    if causal:
        ke = (torch.arange(1, m + 1, device="cuda") * (n // m)).int()
    return ks, ke


def time_us(f, repeats: int = 7) -> float:
    """Median over replays of a CUDA graph of so many calls as take about 10 ms."""
    f()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    f()
    stop.record()
    torch.cuda.synchronize()
    calls = max(1, min(20, int(10 / max(start.elapsed_time(stop), 0.05))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            f()
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls * 1000)
    return statistics.median(times)


def metric(x, y):
    x, y = x.double(), y.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


def check(out, q, k, scheme, w, ks, ke, rows=48) -> float:
    """The metric against the reference on some rows; the mask must be equal."""
    pick = torch.linspace(0, len(w) - 1, rows, device="cuda").long()
    heads = w.shape[1]
    at = (pick[:, None] * heads + torch.arange(heads, device="cuda")).flatten()
    part = Quantized(q.codes[at], q.scales[at], None, q.amax)
    right = reference.mqa_logits(part, k, scheme, w[pick], ks[pick], ke[pick])
    found = out[pick].float()
    assert torch.equal(found == -torch.inf, right == -torch.inf), "the mask differs"
    inside = right != -torch.inf
    return metric(found[inside], right[inside])


def dense_variants():
    """name -> (scheme, function of (expanded, ks, ke, out))."""
    found = {}

    def through_triton(tile, x, amax, ks, ke, out):
        mqa_dense.logits(x, *amax, ks, ke, out, compressed=False, clean=True, tile=tile)

    def through_gluon(tile, x, amax, ks, ke, out):
        mqa_hopper.logits(x, ks, ke, out, clean=True, tile=tile)

    found["triton 256x64 w4 s4"] = MX, functools.partial(through_triton, mqa_dense.Tile(256, 64, 4, 4))
    for stages, fadd in [(4, True), (4, False), (6, True)]:
        tile = mqa_hopper.Tile(stages, fadd)
        found[f"gluon s{stages} {'fadd' if fadd else 'max'}"] = MX, functools.partial(through_gluon, tile)
    for c, n, w, s in [(128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4)]:
        found[f"bf16 {c}x{n} w{w} s{s}"] = NV, functools.partial(through_triton, mqa_dense.Tile(c, n, w, s))
    return found


def run_dense(name, shape, results, quick):
    scheme, f = dense_variants()[name]
    m, n = PREFILL[shape]
    q, k, w = case(m, n, scheme=scheme)
    ks, ke = ranges(m, n, False)
    x = mqa_expand.expand(q.codes, q.scales, w, k.codes, k.scales, scheme.block[1], e5m2=scheme is MX)
    out = torch.full((m, n), 5.0, device="cuda")
    run = lambda: f(x, (q.amax, k.amax), ks, ke, out)  # noqa: E731
    run()
    torch.cuda.synchronize()
    if quick:
        return
    row = dict(what="dense", name=name, shape=shape, error=check(out, q, k, scheme, w, ks, ke), us=time_us(run))
    if shape == "2048x8192":
        ks2, ke2 = ranges(m, n, True)
        out.fill_(5.0)
        f(x, (q.amax, k.amax), ks2, ke2, out)
        row["causal_error"] = check(out, q, k, scheme, w, ks2, ke2)
        row["causal_us"] = time_us(lambda: f(x, (q.amax, k.amax), ks2, ke2, out))
    results.append(row)
    print(row, flush=True)


@functools.cache
def decode_case(paged: bool, sequences: int = 256, length: int = 65536, page: int = 64):
    q, _, w = case(sequences, 64)
    make = torch.Generator("cuda").manual_seed(3)
    codes = torch.randint(0, 256, (sequences * length, D // 2), dtype=torch.uint8, device="cuda", generator=make)
    scales = torch.randint(125, 129, (sequences * length, D // 32), dtype=torch.uint8, device="cuda", generator=make)
    if not paged:
        ks = torch.arange(sequences, device="cuda", dtype=torch.int32) * length
        return q, Quantized(codes, scales, None), w, ks, ks + length, None
    pages = sequences * length // page
    order = torch.randperm(pages, device="cuda", generator=make)
    cache = torch.empty(pages, page * (D // 2 + 4), dtype=torch.uint8, device="cuda")
    cache[order, : page * D // 2] = codes.view(pages, -1)
    cache[order, page * D // 2 :] = scales.view(pages, -1)
    limits = torch.full((sequences, 1), length, dtype=torch.int32, device="cuda")
    return q, cache.view(pages, page, 1, -1), w, limits, order.int().view(sequences, -1), Quantized(codes, scales, None)


DECODE = [
    mqa_hopper_direct.Tile(*options, 132 * 32)
    for options in [(4, 2, True), (3, 2, True), (4, 1, True), (3, 4, True), (4, 2, False)]
]  # fmt: skip


def run_decode(paged, tile, results, quick):
    length = 65536
    if paged:
        q, cache, w, limits, table, flat = decode_case(True)
        codes, options = (cache, None), dict(limit=length, ranges=(None, limits), table=table, sequences=len(limits))
    else:
        q, flat, w, ks, ke, _ = decode_case(False)
        codes, options = flat[:2], dict(limit=len(flat.codes), ranges=(ks, ke))
    none = q.codes[:0]
    x = mqa_expand.expand(q.codes, q.scales, w, none, none, 32, e5m2=True)
    out = torch.full((len(w), length), -torch.inf, device="cuda")
    run = lambda: mqa_hopper_direct.direct(x.queries, x.weights, *codes, x.flag, out, heads=H, tile=tile, **options)  # noqa: E731
    run()
    assert x.flag.item() == 0
    torch.cuda.synchronize()
    if quick:
        return
    worst = 0.0
    for s in (0, 101, 255):
        own = slice(s * length, (s + 1) * length)
        part = Quantized(q.codes[s * H : (s + 1) * H], q.scales[s * H : (s + 1) * H], None)
        key = Quantized(flat.codes[own], flat.scales[own], None)
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        right = reference.mqa_logits(part, key, MX, w[s : s + 1], zero, zero + length)
        worst = max(worst, metric(out[s : s + 1], right))
    row = dict(what="decode", paged=paged, tile=list(tile), error=worst, us=time_us(run))
    row["TB/s"] = 256 * length * (D // 2 + 4) / row["us"] / 1e6
    results.append(row)
    print(row, flush=True)


def run_expand(results, quick):
    for shape, (m, n) in PREFILL.items():
        if quick and shape != "2048x8192":
            continue
        for scheme in (MX, NV):
            q, k, w = case(m, n, scheme=scheme)
            run = lambda: mqa_expand.expand(q.codes, q.scales, w, k.codes, k.scales, scheme.block[1], e5m2=scheme is MX)  # noqa: E731, B023
            run()
            if not quick:
                row = dict(what="expand", shape=shape, scheme=str(scheme), us=time_us(run))
                results.append(row)
                print(row, flush=True)


def jobs():
    for name in dense_variants():
        yield f"dense {name}", functools.partial(run_dense, name, "2048x8192")
    for paged in (True, False):
        for tile in DECODE:
            yield f"decode {paged} {tile}", functools.partial(run_decode, paged, tile)
    yield "expand", run_expand


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default=".")
    arguments = parser.parse_args()
    work = [(name, f) for name, f in jobs() if arguments.only in name]
    results = []
    if arguments.warm:
        index, count = map(int, arguments.warm.split("/"))
        work = work[index::count]
    for name, f in work:
        try:
            f(results, bool(arguments.warm))
        except Exception:  # one variant that does not compile must not end the sweep
            print(name, traceback.format_exc().strip().splitlines()[-1], flush=True)
    if arguments.warm:
        return
    best = [row for row in results if row["what"] == "dense" and not row["name"].startswith("bf16")]
    best.sort(key=lambda row: row["us"])
    for row in best[:3]:
        for shape in ("4096x32768", "8192x65536"):
            run_dense(row["name"], shape, results, False)
    case.cache_clear()
    Path(arguments.out, "sweep.json").write_text(json.dumps(results, indent=1))
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)


if __name__ == "__main__":
    main()
