"""Which share of the whole step's matmul FLOPs ran in which format, and what was left out and why.

Rows of converted layers come from the ledger, all other products from ``ForeignMatmuls``; nothing is computed from
shapes in the configuration. Phases of a schedule weigh by their length.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.auditing.matmuls import KINDS
from nvfp4_train.backend import NATIVE
from nvfp4_train.formats import FORMATS
from nvfp4_train.hardware import instruction
from nvfp4_train.recipe import BF16


def scheme_of(text: str) -> Scheme | None:
    """The scheme behind a ledger's text; None for ``bf16`` and for operands that are no scheme (``float32``)."""
    return Scheme.parse(text) if text.count(":") >= 4 else None


def format_name(text: str) -> str:
    """``e2m1:e4m3:...`` -> ``nvfp4``; what is no scheme stays."""
    scheme = scheme_of(text)
    if scheme is None:
        return text
    named = [name for name, f in FORMATS.items() if (f.element, f.scale) == (scheme.element, scheme.scale)]
    return named[0] if named else f"{scheme.element}/{scheme.scale}"


def described(text: str) -> dict[str, Any]:
    """An operand in words: format, block, rounding, Hadamard."""
    scheme = scheme_of(text)
    if scheme is None:
        return {"format": text, "block": None, "rounding": None, "hadamard": None}
    mask = scheme.sign_mask if isinstance(scheme.sign_mask, str) else f"{scheme.sign_mask:04X}"
    signs = f"{scheme.hadamard} points, signs {mask}" if scheme.hadamard else None
    return {
        "format": format_name(text), "block": "x".join(map(str, scheme.block)), "rounding": scheme.rounding,
        "hadamard": signs,
    }  # fmt: skip


def table(gemms: list[dict[str, Any]], foreign: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row for each GEMM that ran: layer, gemm, both operands, backend, kind of instruction where native,
    calls, FLOPs, and whether both operands were quantized."""
    rows = [
        {
            "layer": row["layer"], "gemm": row["gemm"], "a": described(row["a"]), "b": described(row["b"]),
            "backend": row["backend"], "instruction": _instruction(row), "calls": row["calls"],
            "flops": row["flops"], "ours": True,
            "quantized": scheme_of(row["a"]) is not None and scheme_of(row["b"]) is not None,
        }
        for row in gemms
    ]  # fmt: skip
    plain = described(BF16) | {"format": "high precision"}
    rows += [
        {
            "layer": where, "gemm": kind, "a": plain, "b": plain, "backend": "torch", "instruction": None,
            "calls": None, "flops": flops, "ours": False, "quantized": False,
        }
        for (kind, where), flops in foreign.items()
    ]  # fmt: skip
    return rows


def _instruction(row: dict[str, Any]) -> str | None:
    """The kind of matrix instruction of a product that ran native; `audit --kernels` reads it from the code."""
    if row["backend"] not in NATIVE:
        return None
    found = instruction(scheme_of(row["a"]), scheme_of(row["b"]))
    return found if isinstance(found, str) else found.kind


def shares(phases: list[tuple[float, list[dict[str, Any]]]]) -> dict[str, Any]:
    """``phases``: (weight, rows of ``table``). Shares of 0..1 over the whole step and for each kind of GEMM."""
    done: Counter[str] = Counter()
    all_: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    for weight, rows in phases:
        total = sum(row["flops"] for row in rows) or 1
        for row in rows:
            kind = row["gemm"] if row["gemm"] in KINDS else "other"
            part = weight * row["flops"] / total
            all_[kind] += part
            if row["quantized"]:
                done[kind] += part
                formats[" x ".join(dict.fromkeys((row["a"]["format"], row["b"]["format"])))] += part
    whole = sum(all_.values())
    return {
        "quantized": sum(done.values()) / whole if whole else 0.0,
        "by_gemm": {k: {"of_step": all_[k], "quantized": done[k] / all_[k]} for k in KINDS if all_[k]},
        "by_format": dict(formats),
    }  # fmt: skip


def sentence(found: dict[str, Any]) -> str:
    """The shares in one sentence."""
    formats = found["by_format"]
    if not formats:
        return "0.0% of the step's matmul FLOPs ran quantized"
    names = " and ".join(f"{100 * part:.1f}% in {name}" for name, part in sorted(formats.items(), key=lambda i: -i[1]))
    rows = {kind: row["quantized"] for kind, row in found["by_gemm"].items() if kind != "other"}
    kinds = ", ".join(f"{kind.capitalize()} {100 * share:.0f}%" for kind, share in rows.items())
    return f"{100 * found['quantized']:.1f}% of the step's matmul FLOPs ran quantized ({names}): {kinds}"
