"""The report's figures, as PNG bytes.

Colours are Okabe and Ito's (told apart by colour-blind readers); line styles differ as well, for print without colour.
Figures are drawn small with large type: on a phone they are 360 pixels wide. No pyplot: it keeps global state and may
look for a display.
"""

import io
import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from nvfp4_train.experiment.results import Run, is_number
from nvfp4_train.experiment.statistics import Analysis

BLACK = "#000000"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
STYLES = ["-", "--", "-.", ":"]
BAND = "#E3EFE6"
FLOOR = "#6E6E6E"
PLAIN = "bf16 x bf16"
MOST_SHADED = 3  # arms whose intervals can be told apart when drawn over each other
FORMAT_HATCHES = ["", "//", "..", "xx", "\\\\"]


def arm_styles(analysis: Analysis) -> dict[str, dict]:
    """Arm -> colour and line style; grey for noise floors. Of 6 colours and 4 styles no two of 12 arms share both."""
    styles, index = {}, 0
    for arm in analysis.arms:
        if arm.role == "noise_floor":
            styles[arm.name] = {"color": FLOOR, "linestyle": ":"}
            continue
        styles[arm.name] = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": STYLES[(index // len(COLOURS) + index) % len(STYLES)],
        }
        index += 1
    return styles


def figures(run: Run, analysis: Analysis) -> dict[str, bytes]:
    """File stem -> PNG. A figure with nothing to show is left out."""
    drawn = {
        "final_gap": _final_gap(analysis),
        "loss": _loss(run, analysis),
        "gap": _gap(analysis),
        "formats": _formats(run),
    }
    return {stem: _png(figure) for stem, figure in drawn.items() if figure is not None}


def _final_gap(analysis: Analysis) -> Figure | None:
    """One row an arm: a dot per seed, the mean, its interval; behind them the band and the noise floor."""
    arms = [arm for arm in analysis.arms if arm.gap_percent and math.isfinite(arm.gap_percent.mean)]
    if not arms:
        return None
    figure, axes = _axes(0.75 + 0.5 * len(arms))
    handles = _draw_references(axes.axvspan, axes.axvline, analysis)
    axes.axvline(0, color=BLACK, linewidth=0.8)
    for row, arm in enumerate(arms):
        colour = arm_styles(analysis)[arm.name]["color"]
        gap = arm.gap_percent
        if gap.low is not None:
            axes.plot([gap.low, gap.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            for end in (gap.low, gap.high):
                axes.plot([end, end], [row - 0.14, row + 0.14], color=colour, linewidth=2.5)
        axes.plot(
            arm.gaps_percent, [row + 0.26] * gap.n, "o", color=colour, markersize=3.5, alpha=0.75, markeredgewidth=0
        )
        axes.plot([gap.mean], [row], "D", color=colour, markersize=7)
    axes.set_yticks(range(len(arms)), [_text(arm.name, 28) for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("Final held-out gap to BF16 (%)")
    axes.grid(axis="y", visible=False)
    intervals = any(arm.gap_percent.low is not None for arm in arms)
    handles += [
        Line2D(
            [],
            [],
            color=FLOOR,
            marker="D",
            linestyle="-" if intervals else "",
            label="mean, 95% interval" if intervals else "mean",
        ),
        Line2D([], [], color=FLOOR, marker="o", linestyle="", markersize=4, label="one seed"),
    ]
    _legend_below(figure, handles)
    return figure


def _loss(run: Run, analysis: Analysis) -> Figure | None:
    """Held-out loss: each seed thin, the mean of the seeds thick. Unfinished jobs are drawn as far as they came."""
    figure, axes = _axes(3.2)
    handles, tokens_seen = [], set()
    styles = {analysis.control: {"color": BLACK, "linestyle": "-"}} | arm_styles(analysis)
    for name, style in styles.items():
        curves = []
        for seed in run.seeds:
            job = run.job(name, seed)
            curve = {
                line["tokens"]: line["loss"] for line in job.evals if is_number(line["loss"]) and line["tokens"] > 0
            }
            if not curve:
                continue
            axes.plot(list(curve), list(curve.values()), **style, linewidth=0.6, alpha=0.45)
            tokens_seen |= set(curve)
            if job.finished:
                curves.append(curve)
            else:
                axes.plot([max(curve)], [curve[max(curve)]], "x", color=style["color"], markersize=8, markeredgewidth=2)
        if curves:
            shared = sorted(set.intersection(*map(set, curves)))
            axes.plot(shared, [sum(curve[t] for curve in curves) / len(curves) for t in shared], **style, linewidth=1.8)
            handles.append(Line2D([], [], **style, linewidth=1.8, label=_text(name, 30)))
    if not tokens_seen:
        return None
    if any(not job.finished and job.evals for job in run.jobs.values()):
        handles.append(
            Line2D([], [], color=BLACK, marker="x", linestyle="", markersize=7, markeredgewidth=2, label="stopped here")
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(
        LogLocator(10, subs=(1.0, 2.0, 5.0) if max(tokens_seen) / min(tokens_seen) < 300 else (1.0,))
    )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("Training tokens (log scale)")
    axes.set_ylabel("Held-out loss (nats per token)")
    _legend_below(figure, handles)
    return figure


def _gap(analysis: Analysis) -> Figure | None:
    """Gap in percent along training: mean over the pairs, its interval shaded."""
    arms = [arm for arm in analysis.arms if len(arm.along) > 1]
    if not arms:
        return None
    figure, axes = _axes(3.2)
    handles = _draw_references(axes.axhspan, axes.axhline, analysis)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    late = [0.0]  # what must be seen: everything in the last two thirds; the wild start may leave the frame
    if analysis.band_percent is not None:
        late += [-analysis.band_percent, analysis.band_percent]
    shaded = sum(arm.role == "arm" for arm in arms) <= MOST_SHADED
    for arm in arms:
        tokens = [point[1] for point in arm.along]
        gaps = [point[2] for point in arm.along]
        style = arm_styles(analysis)[arm.name]
        ends = shaded and arm.role == "arm" and gaps[0].low is not None
        axes.plot(tokens, [gap.mean for gap in gaps], **style, linewidth=1.8)
        if ends:
            axes.fill_between(
                tokens, [g.low for g in gaps], [g.high for g in gaps], color=style["color"], alpha=0.18, linewidth=0
            )
        for point, gap in zip(tokens, gaps, strict=True):
            if point >= tokens[-1] / 3:
                late += [gap.low, gap.high] if ends else [gap.mean]
        handles.append(Line2D([], [], **style, linewidth=1.8, label=_text(arm.name, 30)))
    margin = 0.08 * (max(late) - min(late)) or 1.0
    axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("Training tokens")
    axes.set_ylabel("Held-out gap to BF16 (%)")
    _legend_below(figure, handles)
    return figure


def _formats(run: Run) -> Figure | None:
    """One bar an arm: the share of matmul FLOPs by operand formats."""
    flops = [(arm["name"], run.record.get("flops", {}).get(arm["name"])) for arm in run.arms()]
    flops = [(name, rows) for name, rows in flops if rows]
    if not flops:
        return None
    shares = [(name, shares_by_format(rows)) for name, rows in flops]
    formats = sorted(
        {kind for _, share in shares for kind in share}, key=lambda kind: (kind == PLAIN, "bf16" in kind, kind)
    )
    figure, axes = _axes(0.8 + 0.45 * len(shares))
    handles = []
    for index, kind in enumerate(formats):
        plain = kind == PLAIN
        look = {
            "facecolor": "#C9CDD2" if plain else COLOURS[index % len(COLOURS)],
            "hatch": "" if plain else FORMAT_HATCHES[index % len(FORMAT_HATCHES)],
            "edgecolor": "white",
        }
        for row, (_, share) in enumerate(shares):
            left = sum(share.get(other, 0) for other in formats[:index])
            width = 100 * share.get(kind, 0)
            axes.barh(row, width, left=100 * left, height=0.62, linewidth=0.8, **look)
            if width >= 9:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
                axes.text(100 * left + width / 2, row, f"{width:.0f}%", ha="center", va="center", fontsize=9, bbox=box)
        handles.append(Patch(**look, label=_text(kind, 44)))
    axes.set_yticks(range(len(shares)), [_text(name, 28) for name, _ in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set_xlabel("Share of the matmul FLOPs counted (%)")
    _legend_below(figure, handles)
    return figure


def shares_by_format(rows: list[dict]) -> dict[str, float]:
    """Sum the record's rows (gemm, format, share) over the three GEMMs."""
    shares: dict[str, float] = {}
    for row in rows:
        shares[row["format"]] = shares.get(row["format"], 0.0) + row["share"]
    return shares


def _draw_references(span, line, analysis: Analysis) -> list:
    """Draw band and noise floors with the axes' own span and line functions; -> legend handles."""
    handles = []
    if analysis.band_percent is not None:
        span(-analysis.band_percent, analysis.band_percent, color=BAND, zorder=0)
        handles.append(Patch(color=BAND, label=f"equivalence band ±{analysis.band_percent:g}%"))
    for floor in analysis.noise_floors[:1]:
        for side in (-floor.rms_percent, floor.rms_percent):
            line(side, color=FLOOR, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        label = f"noise floor ±{floor.rms_percent:.2g}%"
        handles.append(Line2D([], [], color=FLOOR, linewidth=1.0, linestyle=(0, (4, 3)), label=label))
    return handles


def _axes(height: float):
    figure = Figure(figsize=(5.4, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_size(10)
    axes.yaxis.label.set_size(10)
    return figure, axes


def _legend_below(figure: Figure, handles: list) -> None:
    columns = 1 if max(len(handle.get_label()) for handle in handles) > 26 else 2
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * rows)  # the plot keeps its height, however long the legend
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False, handlelength=2.6
    )


def _text(name: str, longest: int) -> str:
    """A name as matplotlib shows it: `$` is no formula, a leading underscore no wish to be left out of the legend."""
    short = name if len(name) <= longest else name[: longest - 1] + "…"
    return (" " + short if short.startswith("_") else short).replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
