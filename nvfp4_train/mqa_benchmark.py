"""``bench mqa_logits``: from packed FP4 to logits, against the same written in PyTorch, in one run.

The rival dequantizes to BF16, multiplies (float32 out where the library can), takes relu, weight and sum, compiled on a
GPU. It holds all M x H x N scores, so it is left out where they would not fit. On a GPU both are CUDA graphs: the time
is the device's.
"""

import torch
from torch import Tensor

from nvfp4_kernels.reference.codecs import E2M1_VALUES
from nvfp4_kernels.scheme import Scheme
from nvfp4_train.benchmark import captured, median_seconds
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, MQAOperand, mqa_operand
from nvfp4_train.mqa_ops import backend_of
from nvfp4_train.recipe import OperandSpec

SHAPES = {"cuda": [(2048, 8192), (4096, 32768), (8192, 65536)], "cpu": [(64, 512)]}  # queries, keys
SEQUENCES = {"cuda": (256, 65536), "cpu": (4, 512)}  # of decoding, and the keys each has
HEADS = {"cuda": (64, 128), "cpu": (8, 64)}  # H, D
MOST_SCORES = 1 << 31  # of the rival, in all
FORMATS = {"mxfp4": DEEPSEEK, "nvfp4": OperandSpec(format="nvfp4", block="1x16", rounding="nearest")}
PAGE = 64


def bench_mqa_logits(
    target: torch.device, shapes: list[tuple[int, int]] | None = None, decoding: bool = True, repeats: int = 7
) -> list[dict]:
    """One row a case: microseconds, TFLOP/s of all pairs (or of those in the range), and the rival's time over ours.

    Prefill: M queries of all N keys, and under a causal mask, in both formats. ``decoding``: one query a sequence with
    keys of its own, paged and as one tensor, with TB/s of packed keys.
    """
    heads, head_dim = HEADS[target.type]
    rows = []
    for queries, keys in shapes or SHAPES[target.type]:
        for name, spec in FORMATS.items():
            q, k, weights = _operands(target, spec, queries, keys, heads, head_dim)
            zero = torch.zeros(queries, dtype=torch.int32, device=target)
            causal = ((torch.arange(queries, device=target) + 1) * keys / queries).ceil().int()
            for case, end, pairs in (("all keys", zero + keys, 1.0), ("causal", causal, 0.5)):
                ours = lambda q=q, k=k, w=weights, ks=zero, ke=end: fp4_mqa_logits(q, k, w, ks, ke)  # noqa: E731
                functions = {"ours": captured(ours, target)}
                if case == "all keys" and queries * heads * keys <= MOST_SCORES:
                    functions["rival"] = captured(_rival(q, k, weights, target), target)
                seconds = median_seconds(functions, target, repeats)
                flops = 2 * queries * heads * keys * head_dim * pairs
                rows.append(_row(f"{queries}x{keys} {case}", name, q, seconds, flops / 1e12, "TFLOP/s"))
    if decoding:
        rows += _decoding(target, heads, head_dim, repeats)
    return rows


def _decoding(target: torch.device, heads: int, head_dim: int, repeats: int) -> list[dict]:
    sequences, length = SEQUENCES[target.type]
    q, few, weights = _operands(target, DEEPSEEK, sequences, length, heads, head_dim)
    # every sequence the same keys' bytes, in memory of its own: their values make no difference to the time
    codes, scales = few.deepgemm()
    codes, scales = codes.repeat(sequences, 1), scales.repeat(sequences)
    ks = torch.arange(sequences, dtype=torch.int32, device=target) * length
    in_pages = codes.view(torch.uint8).view(-1, PAGE * head_dim // 2), scales.view(torch.uint8).view(-1, PAGE * 4)
    pages = torch.cat(in_pages, dim=1)
    table = torch.arange(len(pages), dtype=torch.int32, device=target).view(sequences, -1)
    context = torch.full((sequences,), length, dtype=torch.int32, device=target)
    cache = pages.view(-1, PAGE, 1, head_dim // 2 + 4)
    single = q._replace(shape=(sequences, 1, heads, head_dim))
    cases = {
        "one tensor": lambda: fp4_mqa_logits(q, (codes, scales), weights, ks, ks + length, max_seqlen_k=length),
        "paged": lambda: fp4_paged_mqa_logits(single, cache, weights, context, table),
    }
    size = sequences * length * (head_dim // 2 + 4) / 1e12
    rows = []
    for name, function in cases.items():
        seconds = median_seconds({"ours": captured(function, target)}, target, repeats)
        rows.append(_row(f"decode {sequences}x{length} {name}", "mxfp4", q, seconds, size, "TB/s"))
    return rows


def _row(case: str, name: str, q: MQAOperand, seconds: dict[str, float], work: float, unit: str) -> dict:
    ratio = seconds["rival"] / seconds["ours"] if "rival" in seconds else None
    return {
        "case": case,
        "format": name,
        "backend": backend_of(q.quantized.codes, q.quantized.scheme_text),
        "us": seconds["ours"] * 1e6,
        "rate": f"{work / seconds['ours']:.3g} {unit}",
        "PyTorch / ours": "-" if ratio is None else ratio,
    }


def _operands(target, spec, queries, keys, heads, head_dim) -> tuple[MQAOperand, MQAOperand, Tensor]:
    make = torch.Generator(target).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=make, device=target)  # noqa: E731
    q, k = mqa_operand(draw(queries, heads, head_dim), spec), mqa_operand(draw(keys, head_dim), spec)
    return q, k, draw(queries, heads)


def _rival(q: MQAOperand, k: MQAOperand, weights: Tensor, target: torch.device):
    """The same logits in plain PyTorch; float32 scores would double what it moves, so they are BF16, as usual."""
    scheme: Scheme = q.quantized.scheme
    parts = [(x.quantized.codes, x.quantized.scale_bytes, x.quantized.global_amax) for x in (q, k)]
    heads, head_dim = q.shape[1:]
    # on the device beforehand: a graph cannot record a copy from the host
    e2m1 = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.bfloat16, device=target)
    scale_type = torch.float8_e8m0fnu if scheme.scale == "e8m0" else torch.float8_e4m3fn

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        index = torch.stack((codes & 15, codes >> 4), dim=2).view(len(codes), -1, scheme.block[1])
        return (e2m1[index.int()] * scales.view(scale_type).bfloat16().unsqueeze(2)).view(len(codes), head_dim)

    def run():
        values = [decode(codes, scales) for codes, scales, _ in parts]
        scores = (values[0] @ values[1].T).view(len(weights), heads, -1)
        logits = (scores.float().relu() * weights.unsqueeze(2)).sum(1)
        if parts[0][2] is not None:
            logits = logits * (parts[0][2] * parts[1][2] * (1 / 2688**2))
        return logits

    return torch.compile(run, dynamic=False) if target.type == "cuda" else run
