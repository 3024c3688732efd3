"""What a run says, for people (`report.html`, PNGs, a table in the terminal) and for machines (`summary`).

Every number comes from `statistics`, every sentence from `wording`. The page is one file: styles inline, figures as
data URIs, nothing fetched.
"""

import base64
import math
import os
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from nvfp4_train.experiment.audit_page import audit_section
from nvfp4_train.experiment.results import Run, is_number, read_run
from nvfp4_train.experiment.statistics import LEVEL, Analysis, ArmStatistics, Interval, analyze
from nvfp4_train.experiment.wording import (
    count,
    duration,
    gap_note,
    headline,
    interval_text,
    loss_text,
    multiplier_text,
    noise_sentence,
    percent,
    plain,
    sentence,
    signed,
)

VERDICT_STYLES = {"inside": "bold green", "outside": "bold red", "cannot tell": "bold yellow", "no band": "dim"}


def render(run_dir: str | Path) -> Path:
    """Write `report.html` and its PNGs into the run folder; -> the page's path. ValueError if it is no run folder.

    May be called again at any time, also while jobs are running. Each file is replaced whole.
    """
    from nvfp4_train.experiment import plots  # matplotlib takes a second to load; `summary` does without

    run = read_run(run_dir)
    analysis = analyze(run)
    pictures = plots.figures(run, analysis)
    for stem, png in pictures.items():
        _replace(run.path / f"{stem}.png", png)
    gemms, format_rows = _format_rows(run)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files(__package__).joinpath("report_template.html").read_text(encoding="utf-8"))
    page = template.render(
        run=run,
        record=run.record,
        analysis=analysis,
        headline=headline(analysis),
        sentences=[(arm, sentence(arm, analysis)) for arm in analysis.arms],
        arm_rows=[arm_row(arm) for arm in analysis.arms],
        control_row=_control_row(analysis),
        noise=noise_sentence(analysis),
        job_rows=_job_rows(run, analysis),
        pictures={stem: "data:image/png;base64," + base64.b64encode(png).decode() for stem, png in pictures.items()},
        gap_note=gap_note(analysis, plots.MOST_SHADED),
        gemms=gemms,
        format_rows=format_rows,
        conversions=_conversions(run),
        audit=audit_section(run),
        facts=_facts(run),
        level=f"{100 * LEVEL:g}%",
    )
    path = run.path / "report.html"
    _replace(path, page.encode())
    return path


def summary(run_dir: str | Path) -> dict[str, Any]:
    """The run in numbers, safe for JSON (no NaN: what is not known is None). ValueError if it is no run folder."""
    run = read_run(run_dir)
    analysis = analyze(run)
    arms = []
    for arm in analysis.arms:
        row = asdict(arm)
        row["left_out"] = list(arm.left_out.values())
        row["along"] = [{"step": step, "tokens": tokens, "gap_percent": asdict(gap)} for step, tokens, gap in arm.along]
        row["sentence"] = sentence(arm, analysis)
        arms.append(row)
    return _json_safe(
        {
            "name": run.record.get("name"),
            "question": run.record.get("question"),
            "verdict": headline(analysis),
            "control": {"name": analysis.control, "loss": analysis.control_loss and asdict(analysis.control_loss)},
            "control_spread_percent": analysis.control_spread_percent,
            "band_percent": analysis.band_percent,
            "level": LEVEL,
            "seeds": run.seeds,
            "noise_floor": [asdict(floor) for floor in analysis.noise_floors],
            "arms": arms,
            "problems": analysis.problems,
        }
    )


def summary_table(summary: dict[str, Any]) -> Table:
    """The same for a terminal of 80 columns or more."""
    band = summary["band_percent"]
    table = Table(
        title=Text(str(summary["name"] or "run")), caption=Text(_table_caption(summary)), caption_justify="left"
    )
    for heading, justify in (
        ("arm", "left"),
        ("loss", "right"),
        ("gap %", "right"),
        ("95% interval", "right"),
        ("tokens", "right"),
        ("seeds", "right"),
        (f"±{band:g}%" if band is not None else "verdict", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")
    control = summary["control"]
    loss = control["loss"]
    table.add_row(
        Text(control["name"]),
        loss_text(loss and loss["mean"]),
        "",
        "",
        "",
        str(loss["n"] if loss else 0),
        Text("control", "dim"),
    )
    for arm in summary["arms"]:
        gap = Interval(**arm["gap_percent"]) if arm["gap_percent"] and arm["gap_percent"]["mean"] is not None else None
        ratio = arm["multiplier"]["ratio"]
        kind = arm["verdict"]["kind"]
        verdict = Text(kind, VERDICT_STYLES[kind])
        if arm["verdict"]["seeds_needed"]:
            verdict.append(f" (~{arm['verdict']['seeds_needed']:,} seeds)", "dim")
        if arm["role"] == "noise_floor":
            verdict = Text("noise floor", "dim")
        table.add_row(
            Text(arm["name"]),
            loss_text(arm["loss"] and arm["loss"]["mean"]),
            percent(gap).rstrip("%") if gap else "–",
            interval_text(gap) or "–",
            f"{ratio['mean']:.2f}x" if ratio else "–",
            str(len(arm["seeds"])),
            verdict,
        )
    return table


def _table_caption(summary: dict[str, Any]) -> str:
    lines = ["tokens: what BF16 needs for the same loss, as a share of the arm's own"]
    return "\n".join(lines + [f"! {problem}" for problem in summary["problems"]])


def arm_row(arm: ArmStatistics) -> dict[str, Any]:
    """One row of the page's table, as text."""
    bits = arm.gap_bits_per_byte
    return {
        "name": arm.name,
        "role": arm.role,
        "loss": loss_text(arm.loss and arm.loss.mean),
        "loss_bf16_forward": loss_text(arm.loss_bf16_forward and arm.loss_bf16_forward.mean),
        "gap_bf16_forward": percent(arm.gap_percent_bf16_forward),
        "gap_percent": percent(arm.gap_percent),
        "interval": interval_text(arm.gap_percent),
        "gap_nats": f"{signed(arm.gap_nats.mean, 4)}" if arm.gap_nats else "–",
        "gap_bits": f"{signed(bits.mean, 4)}" if bits else "–",
        # Chaos is no saving or loss of tokens: half of all nudged runs end below anything their control reached.
        "multiplier": multiplier_text(arm.multiplier) if arm.role == "arm" else ("–", ""),
        "spikes": f"{arm.spikes} ({arm.control_spikes})" if arm.seeds else "–",
        "seeds": _pairs(len(arm.seeds), "pair"),
        "verdict": arm.verdict.kind,
    }


def _control_row(analysis: Analysis) -> dict[str, str]:
    loss = analysis.control_loss
    return {
        "name": analysis.control,
        "loss": loss_text(loss and loss.mean),
        "seeds": _pairs(loss.n if loss else 0, "seed"),
    }


def _job_rows(run: Run, analysis: Analysis) -> list[dict[str, str]]:
    gaps = {
        (arm.name, seed): gap for arm in analysis.arms for seed, gap in zip(arm.seeds, arm.gaps_percent, strict=True)
    }
    rows = []
    for (arm, seed), job in run.jobs.items():
        result = job.result
        final = result if job.finished else {}  # a failed job's last evaluation is not the loss of a whole training
        memory = result.get("peak_memory_bytes")
        rows.append(
            {
                "arm": arm,
                "seed": str(seed),
                "state": job.state,
                "why": job.why,
                "loss": loss_text(final.get("final_loss")),
                "loss_bf16_forward": loss_text(final.get("final_loss_bf16_forward")),
                "gap": f"{signed(gaps[arm, seed], 2)}%" if (arm, seed) in gaps else "–",
                "spikes": _steps(job.spikes) or ("–" if job.state == "missing" else "none"),
                "phases": "; ".join(f"step {line['step']}: {line.get('text', '')}" for line in job.phases) or "–",
                "speed": f"{result['tokens_per_s']:,.0f}" if is_number(result.get("tokens_per_s")) else "–",
                "time": duration(result.get("seconds")),
                "memory": f"{memory / 2**30:.2f}" if is_number(memory) else "–",
            }
        )
    return rows


def _format_rows(run: Run) -> tuple[list[str], list[dict[str, Any]]]:
    """-> GEMMs in the order they are met, and per arm and operand formats the share of each GEMM."""
    flops = run.record.get("flops", {})
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for arm in run.arms():
        for row in flops.get(arm["name"], []):
            shares = rows.setdefault((arm["name"], row["format"]), {})
            shares[row["gemm"]] = shares.get(row["gemm"], 0.0) + row["share"]
    gemms = list(dict.fromkeys(gemm for shares in rows.values() for gemm in shares))
    return gemms, [
        {
            "arm": arm,
            "format": kind,
            "shares": [f"{100 * shares[gemm]:.1f}%" if gemm in shares else "–" for gemm in gemms],
            "total": f"{100 * sum(shares.values()):.1f}%",
        }
        for (arm, kind), shares in rows.items()
    ]


def _conversions(run: Run) -> list[dict[str, Any]]:
    """Converted names, and what was skipped gathered by reason; arms with the same conversion together."""
    found: list[dict[str, Any]] = []
    for arm, report in run.record.get("conversion", {}).items():
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in report["skipped"]:
            reasons.setdefault((row["reason"], row["kind"]), []).append(row["name"])
        entry = {"converted": report["converted"], "skipped": [(*key, names) for key, names in reasons.items()]}
        alike = [other for other in found if all(other[key] == entry[key] for key in entry)]
        if alike:
            alike[0]["arms"].append(arm)
        else:
            found.append({"arms": [arm], **entry})
    return found


def _steps(lines: list[dict[str, Any]], shown: int = 6) -> str:
    return ", ".join(str(line["step"]) for line in lines[:shown]) + ("…" if len(lines) > shown else "")


def _pairs(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _facts(run: Run) -> list[tuple[str, str]]:
    record = run.record
    tokens = (record.get("tokens_per_step") or 0) * (record.get("total_steps") or 0)
    parameters = record.get("parameters")
    facts = [("Parameters", count(parameters)), ("Training tokens an arm and seed", count(tokens or None))]
    if parameters and tokens:
        facts.append(("Tokens per parameter", f"{tokens / parameters:.3g}"))
    facts += [
        ("Steps", f"{count(record.get('total_steps'))} of {count(record.get('tokens_per_step'))} tokens"),
        ("Seeds", ", ".join(map(str, run.seeds))),
    ]
    if is_number(record.get("bytes_per_token")):
        facts.append(("Bytes per token", f"{record['bytes_per_token']:.4g}"))
    for title, group in (("Data", "data"), ("Version", "versions"), ("Hardware", "hardware")):
        for key, value in (record.get(group) or {}).items():
            words = str(key).replace("_", " ") if group != "versions" else str(key)
            facts.append((f"{title}: {words}", plain(value)))
    return facts


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_safe(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, content: bytes) -> None:
    """Write beside, then rename: a reader never sees half a page."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content)
    os.replace(beside, path)
