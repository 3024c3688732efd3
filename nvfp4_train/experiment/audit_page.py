"""The audit's section of the report: what was proven before training, what was measured and warned of while it ran."""

from __future__ import annotations

import base64
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from nvfp4_train.auditing.sensitivity import told
from nvfp4_train.auditing.statistics import by_operand
from nvfp4_train.experiment.results import Job, Run, is_number
from nvfp4_train.schedule import GEMMS

SHOWN = 12  # layers of a ranking
OPERANDS = (
    "fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input",
)  # fmt: skip


def audit_section(run: Run) -> Markup:
    """HTML, empty where nothing was audited."""
    jobs = [job for job in run.jobs.values() if job.audits or job.weights or job.warnings]
    if not run.audit and not jobs:
        return Markup("")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files(__package__).joinpath("audit_section.html").read_text(encoding="utf-8"))
    picture = _picture(jobs)
    return Markup(
        template.render(
            audits=[_proof(arm, found) for arm, found in run.audit.items()],
            jobs=[_along(job) for job in jobs],
            asked=any(job.audits for job in jobs),
            warnings=[
                {"job": f"{job.arm} seed {job.seed}", "step": line["step"], "text": line["text"]}
                for job in jobs
                for line in job.warnings
            ],
            picture=None if picture is None else "data:image/png;base64," + base64.b64encode(picture).decode(),
        )
    )


def _proof(arm: str, found: dict[str, Any]) -> dict[str, Any]:
    coverage = found["coverage"]
    mismatch = [row for row in found["weights"] if not row["bitwise"]]
    sensitivity = found.get("sensitivity") or {}
    return {
        "arm": arm,
        "ok": found["ok"],
        "sentence": coverage["sentence"],
        "findings": found["findings"],
        "proven": found["proven"],
        "notes": found["notes"],
        "gemms": _gemms(coverage["phases"][0]),
        "skipped": [{**row, "share": _percent(row["share"])} for row in coverage["skipped"]],
        "operands": [_operand(row) for row in by_operand(found["statistics"])],
        "mismatch": None if not mismatch else max(row["mismatch"] for row in mismatch),
        "declared": all(not row["declared"] for row in mismatch),
        "ranking": [
            {
                "layer": row["layer"], "costs": [told(row, key) for key in ("added", *GEMMS)],
                "flops": _percent(row["flops"]),
            }
            for row in sensitivity.get("layers", [])[:SHOWN]
        ],  # fmt: skip
        "keep_bf16": sensitivity.get("keep_bf16", ""),
        "kept": _percent(sensitivity.get("kept_flops", 0.0)),
    }


def _gemms(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Layers summed up: one row for each GEMM and way to run it."""
    total = sum(row["flops"] for row in rows) or 1
    summed: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        ran = " ".join(filter(None, (row["backend"], row.get("instruction"))))
        key = (row["gemm"], _words(row["a"]), _words(row["b"]), ran)
        entry = summed.setdefault(key, [0, 0, 0.0])
        entry[0] += bool(row["layer"])  # attention in the backward pass has no place of its own
        entry[1] += row["calls"] or 0
        entry[2] += row["flops"] / total
    return [
        {
            "gemm": gemm, "a": a, "b": b, "backend": backend, "layers": str(layers), "calls": str(calls or "–"),
            "share": _percent(share),
        }
        for (gemm, a, b, backend), (layers, calls, share) in summed.items()
    ]  # fmt: skip


def _words(operand: dict[str, Any]) -> str:
    if operand["block"] is None:
        return operand["format"]
    turned = f", Hadamard {operand['hadamard']}" if operand["hadamard"] else ""
    return f"{operand['format']} {operand['block']}, {operand['rounding']}{turned}"


def _operand(row: dict[str, Any]) -> dict[str, str]:
    return {
        "operand": row["operand"], "sqnr": "–" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f} dB",
        "worst": row["worst_layer"], "underflow": _percent(row["underflow"]), "saturated": _percent(row["saturated"]),
        "scales": _percent(row["scale_underflow"]), "outlier": f"{row['outlier']:.0f}x",
    }  # fmt: skip


def _along(job: Job) -> dict[str, Any]:
    """First and last audit of a job, side by side."""
    first, last = (job.audits[0], job.audits[-1]) if job.audits else ({}, {})
    rows = [
        {
            "operand": operand,
            "sqnr": _from_to(first, last, f"{operand}/sqnr_db", "{:.1f}", 1),
            "underflow": _from_to(first, last, f"{operand}/underflow", "{:.1f}%", 100),
            "scales": _from_to(first, last, f"{operand}/scale_underflow", "{:.2f}%", 100),
            "amax": _from_to(first, last, f"{operand}/amax", "{:.3g}", 1),
            "outlier": _from_to(first, last, f"{operand}/outlier", "{:.0f}x", 1),
        }
        for operand in OPERANDS
        if f"{operand}/underflow" in last
    ]
    oscillating = [line["worst"] for line in job.weights]
    ratios = [line["grad_to_noise"] for line in job.audits if is_number(line.get("grad_to_noise"))]
    return {
        "name": f"{job.arm} seed {job.seed}", "audits": len(job.audits), "rows": rows,
        "steps": f"step {first['step']} and step {last['step']}" if first else "",
        "ratio": f"{min(ratios):.2f}" if ratios else "–",
        "oscillating": _percent(max(oscillating)) if oscillating else "–",
    }  # fmt: skip


def _from_to(first: dict[str, Any], last: dict[str, Any], key: str, form: str, times: float) -> str:
    values = [form.format(times * line[key]) if is_number(line.get(key)) else "–" for line in (first, last)]
    return values[0] if first is last else " → ".join(values)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _picture(jobs: list[Job]) -> bytes | None:
    """Rounding noise of each operand along the training of the first job that has more than one audit."""
    job = next((job for job in jobs if len(job.audits) > 1), None)
    if job is None:
        return None
    from nvfp4_train.experiment import plots

    figure, axes = plots._axes(2.9)
    for index, operand in enumerate(OPERANDS):
        points = [(line["step"], line[key]) for line in job.audits if is_number(line.get(key := f"{operand}/sqnr_db"))]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=plots.COLOURS[index], linestyle=plots.STYLES[index % 4], label=operand
            )
    axes.set_xlabel(f"Step of {job.arm} seed {job.seed}")
    axes.set_ylabel("Signal over rounding noise (dB)")
    plots._legend_below(figure, axes.get_lines())
    return plots._png(figure)
