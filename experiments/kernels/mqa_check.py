"""Every form of MQA logits on a GPU against the reference there, then whole calls timed: packed FP4 in, logits out.

    python experiments/kernels/mqa_check.py [--out FOLDER] [--no-baseline] [--part I | timed]

Part I is one of the 14 checks (they compile much: run them side by side), ``timed`` the measurements.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import mqa_sweep as sweep
import torch
import triton
from mqa_sweep import MX, NV, metric, quantized, time_us

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_kernels.reference.quantize import decode
from nvfp4_kernels.triton import mqa_logits as kernels


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def ranges(m, n, seed=1):
    make = torch.Generator().manual_seed(seed)
    ks = torch.randint(0, max(n // 2, 1), (m,), generator=make)
    ke = (ks + torch.randint(0, n, (m,), generator=make)).clamp(max=n)
    ke[::5] = ks[::5]
    return ks.int().cuda(), ke.int().cuda()


def worst(name, pairs, bound, failures):
    for found, right in pairs:
        mask = torch.equal(found == -torch.inf, right == -torch.inf)
        inside = right.isfinite()
        error = metric(found[inside], right[inside]) if inside.any() else 0.0
        if not mask or not error < bound:
            failures.append(f"{name}: mask {mask}, error {error:.2e}")
    return error


def forward_cases(failures, index):
    count = 0
    sizes = [
        (129, 64, 4100, 128), (37, 8, 129, 64), (5, 64, 33, 128), (70, 16, 700, 128), (33, 3, 65, 64),
        (64, 1, 200, 128), (1, 32, 1, 128), (300, 64, 1000, 128), (7, 5, 2000, 64),
    ]  # fmt: skip
    for (m, h, n, d), scheme in itertools.product(sizes[index : index + 1], (MX, NV)):
        q, k, w = draw(m, h, d), draw(n, d, seed=1), draw(m, h, seed=2)
        a, b = quantized(q.view(-1, d), scheme), quantized(k, scheme)
        zero = torch.zeros(m, dtype=torch.int32, device="cuda")
        causal = (torch.arange(m, device="cuda") * n // m + 1).int()
        for ks, ke in [ranges(m, n), (zero, zero + n), (zero, causal)]:
            for dtype, bound in [(torch.float32, 1e-7), (torch.bfloat16, 2e-6)]:
                for width in (None, 64, n):
                    arguments = a, b, scheme, w, ks, ke
                    found = kernels.mqa_logits(*arguments, out_dtype=dtype, max_seqlen_k=width)
                    right = reference.mqa_logits(*arguments, max_seqlen_k=width)
                    name = f"{(m, h, n, d)} {scheme.scale} {dtype} {width}"
                    few = 1 + (m * n < 2000)  # logits: the mean of their roundings scatters more
                    worst(name, [(found.float(), right)], bound * few, failures)
                    count += 1
    if index:
        return count
    # exponents that E5M2 does not hold, in one key, one query, and a NaN scale
    q, k, w = draw(50, 64, 128), draw(300, 128, seed=1), draw(50, 64, seed=2)
    for name, change in [("key", lambda q, k: k[7].mul_(2.0**20)), ("query", lambda q, k: q[3, 2, :32].mul_(2.0**-30)),
                         ("both", lambda q, k: (k.mul_(2.0**30), q.mul_(2.0**-12)))]:  # fmt: skip
        q2, k2 = q.clone(), k.clone()
        change(q2, k2)
        a, b = quantized(q2.view(-1, 128), MX), quantized(k2, MX)
        ks, ke = ranges(50, 300)
        for width in (None, 300):
            found, right = (f.mqa_logits(a, b, MX, w, ks, ke, max_seqlen_k=width) for f in (kernels, reference))
            worst(f"wild {name} {width}", [(found, right)], 1e-7, failures)
            count += 1
    k2 = k.clone()
    k2[11, 5] = torch.nan
    a, b = quantized(q.view(-1, 128), MX), quantized(k2, MX)
    zero = torch.zeros(50, dtype=torch.int32, device="cuda")
    found = kernels.mqa_logits(a, b, MX, w, zero, zero + 300)
    if not (found[:, 11].isnan().all() and found.isnan().sum() == 50):
        failures.append("NaN key")
    return count + 1


def paged_cases(failures, page):
    count = 0
    for each, h, d, scheme in itertools.product((1, 3), (64, 8), (128, 64), (MX, NV)):
        lengths = [700, 0, 1, 64, 333]
        total = sum(-(-n // page) for n in lengths)
        size = 4 if scheme is MX else d // 16
        order = torch.randperm(total + 2, generator=torch.Generator().manual_seed(0)).tolist()
        keys = quantized(draw(sum(lengths), d, seed=4), scheme)
        cache = torch.full((total + 2, page * (d // 2 + size)), 255, dtype=torch.uint8, device="cuda")
        table = torch.full((len(lengths), 30), 10**7, dtype=torch.int32)
        first, own = 0, []
        for s, n in enumerate(lengths):
            part = keys.codes[first : first + n], keys.scales[first : first + n]
            own.append(part)
            for p in range(-(-n // page)):
                table[s, p] = order.pop()
                c, x = part[0][p * page : (p + 1) * page], part[1][p * page : (p + 1) * page]
                row = cache[table[s, p]]
                row[: c.numel()] = c.flatten()
                scales = row[page * (d // 2) :].view(page, size)
                scales[: len(x), : x.shape[1]] = x
            first += n
        q, w = draw(len(lengths) * each, h, d), draw(len(lengths) * each, h, seed=2)
        a = quantized(q.view(-1, d), scheme)
        limits = torch.tensor(lengths, device="cuda")[:, None] - each + 1 + torch.arange(each, device="cuda")
        found = kernels.paged_mqa_logits(
            a, cache.view(len(cache), page, 1, -1), keys.amax, scheme, w, limits, table.cuda(), 800
        )
        for s, n in enumerate(lengths):
            rows = slice(s * each, (s + 1) * each)
            its = slice(s * each * h, (s + 1) * each * h)
            part = Quantized(a.codes[its], a.scales[its], None, a.amax)
            right = torch.full((each, 800), -torch.inf, device="cuda")
            if n:
                own_keys = Quantized(*own[s], None, keys.amax)
                right[:, :n] = reference.mqa_logits(part, own_keys, scheme, w[rows], limits[s] * 0, limits[s])
            worst(f"paged {page} {each} {h} {d} {scheme.scale} seq {s}", [(found[rows], right)], 1e-7, failures)
            count += 1
    return count


def gradients(failures, index):
    largest = 0.0
    for (m, h, n, d), scheme in itertools.product([(65, 8, 300, 64), (40, 64, 500, 128)][index : index + 1], (MX, NV)):
        a, b, w = quantized(draw(m * h, d), scheme), quantized(draw(n, d, seed=1), scheme), draw(m, h, seed=2)
        ks, ke = ranges(m, n)
        indices = torch.randint(-1, n + 1, (m, 50), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
        for name, extra, g in [
            ("mqa_logits_backward", (ks, ke), draw(m, n, seed=5)),
            ("mqa_logits_at_backward", (indices,), draw(m, 50, seed=5)),
        ]:  # fmt: skip
            found = getattr(kernels, name)(g, a, b, scheme, w, *extra)
            right = getattr(reference, name)(g, a, b, scheme, w, *extra)
            again = getattr(kernels, name)(g, a, b, scheme, w, *extra)
            for part, x, y, z in zip(("dq", "dk", "dw"), found, right, again, strict=True):
                error = ((x - y).abs().max() / y.abs().max()).item()
                largest = max(largest, error)
                if not error < 2e-6 or not torch.equal(x, z):
                    failures.append(f"{name} {(m, h, n, d)} {scheme.scale} {part}: {error:.2e}")
        at, right = (f.mqa_logits_at(a, b, scheme, w, indices) for f in (kernels, reference))
        worst(f"at {(m, h, n, d)}", [(at, right)], 1e-7, failures)
    return largest


def repeats(failures):
    a, b, w = quantized(draw(129 * 64, 128), MX), quantized(draw(4100, 128, seed=1), MX), draw(129, 64, seed=2)
    ks, ke = ranges(129, 4100)
    first = kernels.mqa_logits(a, b, MX, w, ks, ke)
    for _ in range(19):
        if not torch.equal(kernels.mqa_logits(a, b, MX, w, ks, ke), first):
            failures.append("repeats differ")
    torch.cuda.set_sync_debug_mode("error")
    kernels.mqa_logits(a, b, MX, w, ks, ke)
    kernels.mqa_logits_backward(first.nan_to_num(0, 0, 0), a, b, MX, w, ks, ke)
    torch.cuda.set_sync_debug_mode("default")


def accumulator(rows):
    """How far E5M2 products are from float64's, in units of the sum of the magnitudes, at three spreads of scales."""
    for spread in (0, 4, 10):
        scale = torch.exp2(torch.randint(-spread, spread + 1, (64, 4), device="cuda").float()).repeat_interleave(32, 1)
        q, k = draw(64 * 16, 128) * scale.repeat(16, 1), draw(2048, 128, seed=1)
        a, b, w = quantized(q, MX), quantized(k, MX), draw(16, 64, seed=2)
        zero = torch.zeros(16, dtype=torch.int32, device="cuda")
        found = kernels.mqa_logits(a, b, MX, w, zero, zero + 2048).double()
        q64, k64 = (decode(x.codes, x.scales, MX, 128).double() for x in (a, b))
        s = q64.view(16, 64, 128) @ k64.T
        size = (q64.view(16, 64, 128).abs() @ k64.T.abs() * w.double().abs()[:, :, None]).sum(1)
        right = (s.relu() * w.double()[:, :, None]).sum(1)
        error = ((found - right).abs() / size).max().item()
        row = dict(what="accumulator", spread=spread, worst=error, metric=metric(found, right))
        rows.append(row)
        print(row, flush=True)


def baseline(q, k, w, scheme, m, n):
    """Dequantize, BF16 matmul, relu and weighted sum, as torch.compile fuses them."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")

    def values(x):
        codes = torch.stack((x.codes & 15, x.codes >> 4), 2).flatten(1).int()
        scales = torch.exp2(x.scales.float() - 127)[:, :, None]
        return (table[codes].view(len(codes), -1, 32) * scales).flatten(1).bfloat16()

    @torch.compile(dynamic=False)
    def run():
        scores = values(q) @ values(k).T
        return (scores.view(m, -1, n).float().relu() * w[:, :, None]).sum(1)

    return run


def timed(rows, with_baseline):
    for shape, (m, n) in sweep.PREFILL.items():
        q, k, w = sweep.case(m, n)
        for causal in (False, True):
            ks, ke = sweep.ranges(m, n, causal)
            us = time_us(lambda: kernels.mqa_logits(q, k, MX, w, ks, ke))  # noqa: B023
            row = dict(what="whole", shape=shape, causal=causal, us=us, target=sweep.TARGET[shape])
            row["error"] = sweep.check(kernels.mqa_logits(q, k, MX, w, ks, ke), q, k, MX, w, ks, ke)
            rows.append(row)
            print(row, flush=True)
    for m, n in [(2048, 8192), (64, 4096), (512, 512)]:
        q, k, w = sweep.case(m, n)
        ks, ke = sweep.ranges(m, n, False)
        row = dict(what="compiled", shape=f"{m}x{n}", us=time_us(lambda: kernels.mqa_logits(q, k, MX, w, ks, ke)))  # noqa: B023
        if with_baseline:
            row["pytorch_us"] = time_us(baseline(q, k, w, MX, m, n))
        rows.append(row)
        print(row, flush=True)
    m, n = 2048, 8192
    for scheme in (NV, MX):
        q, k, w = sweep.case(m, n, scheme=scheme)
        ks, ke = sweep.ranges(m, n, True)
        g = draw(m, n)
        row = dict(what="backward", scheme=scheme.scale, dense_us=time_us(lambda: kernels.mqa_logits_backward(g, q, k, scheme, w, ks, ke)))  # noqa: B023, E501
        indices = torch.randint(0, n, (m, 512), device="cuda")
        row["listed_us"] = time_us(lambda: kernels.mqa_logits_at_backward(g[:, :512].contiguous(), q, k, scheme, w, indices))  # noqa: B023, E501
        row["at_us"] = time_us(lambda: kernels.mqa_logits_at(q, k, scheme, w, indices))  # noqa: B023
        row["forward_us"] = time_us(lambda: kernels.mqa_logits(q, k, scheme, w, ks * 0, ke * 0 + n))  # noqa: B023
        rows.append(row)
        print(row, flush=True)
    length = 65536
    q, cache, w, limits, table, _ = sweep.decode_case(True)
    us = time_us(lambda: kernels.paged_mqa_logits(q, cache, None, MX, w, limits, table, length))
    rows.append(dict(what="decode", paged=True, us=us))
    print(rows[-1], flush=True)
    q, flat, w, ks, ke, _ = sweep.decode_case(False)
    us = time_us(lambda: kernels.mqa_logits(q, flat, MX, w, ks, ke, max_seqlen_k=length))
    rows.append(dict(what="decode", paged=False, us=us))
    print(rows[-1], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--part")
    arguments = parser.parse_args()
    failures, rows = [], []
    checks = [(forward_cases, i) for i in range(9)] + [(paged_cases, page) for page in (32, 64, 128)]
    checks += [(gradients, 0), (gradients, 1)]
    wanted = checks if arguments.part is None else [] if arguments.part == "timed" else [checks[int(arguments.part)]]
    for part, which in wanted:
        start = time.time()
        result = part(failures, which)
        print(part.__name__, which, result, f"{time.time() - start:.1f} s, {len(failures)} failures", flush=True)
    print("\n".join(failures[:30]), flush=True)
    if arguments.part not in (None, "timed"):
        return
    repeats(failures)
    print("repeats", failures, flush=True)
    accumulator(rows)
    timed(rows, not arguments.no_baseline)
    record = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    Path(arguments.out, "check.json").write_text(json.dumps(record | dict(failures=failures, rows=rows), indent=1))


if __name__ == "__main__":
    main()
