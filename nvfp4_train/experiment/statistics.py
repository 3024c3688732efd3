"""How large the gap is, and how sure that is.

A recipe and its control share initial weights and data order within a seed, so the seed's own luck drops out of their
difference. Everything here is therefore *paired*: one gap per seed, and over seeds the mean with Student's t interval.
What remains in that interval is what differs between two runs of one seed: the recipe, and chaos. The noise floor
measures the second alone (BF16 trained again from weights nudged by one ulp).

One seed never gives an interval: with n = 1 nothing is known about the spread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from nvfp4_train.experiment.results import Job, Run, is_number

LEVEL = 0.95
MOST_SEEDS = 10_000  # where counting seeds stops; nobody trains that many


@dataclass(frozen=True)
class Interval:
    """Mean of n values with its t interval. `sd`, `low` and `high` are None for one value."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Verdict:
    """`kind`: inside | outside | cannot tell | no band. `reason`: why, in words that follow a colon."""

    kind: str
    reason: str
    seeds_needed: int | None = None  # only for cannot tell; None if unknown or beyond MOST_SEEDS


@dataclass(frozen=True)
class Multiplier:
    """Tokens BF16 needs for the arm's final loss, as a share of the arm's tokens.

    `ratio` is a geometric mean (its `sd` is that of the logarithms); None when out of range.
    """

    ratio: Interval | None
    note: str  # why there is no ratio; empty otherwise


@dataclass(frozen=True)
class ArmStatistics:
    """One arm against the control, over the seeds where both finished. All but counts are None/empty without a pair."""

    name: str
    recipe: str
    role: str
    seeds: list[int]  # the pairs
    left_out: dict[int, str]  # seed that could not be paired -> a sentence that says why
    losses: list[float]  # final held-out loss in nats, quantized forward, per pair
    control_losses: list[float]
    loss: Interval | None
    loss_bf16_forward: Interval | None
    gap_nats: Interval | None
    gap_percent: Interval | None
    gap_bits_per_byte: Interval | None
    gap_percent_bf16_forward: Interval | None
    gaps_percent: list[float]  # per pair
    multiplier: Multiplier
    along: list[tuple[int, int, Interval]]  # (step, tokens, gap in percent) at steps that every pair has
    spikes: int
    control_spikes: int
    verdict: Verdict


@dataclass(frozen=True)
class NoiseFloor:
    """What chaos alone does. `rms_percent`: root mean square gap of one nudged run against its control."""

    arm: str
    gap_percent: Interval
    rms_percent: float


@dataclass(frozen=True)
class Analysis:
    control: str
    control_loss: Interval | None
    control_spread_percent: float | None  # sd of the control's final loss over seeds, percent of its mean
    band_percent: float | None
    noise_floors: list[NoiseFloor]
    arms: list[ArmStatistics]  # every arm but the control
    problems: list[str]


def interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Mean and two-sided t interval; None for no values. Source: Student's t with n - 1 degrees of freedom."""
    if len(values) == 0:
        return None
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) == 1:
        return Interval(mean, 1)
    sd = float(x.std(ddof=1))
    half = _half_width(sd, len(x), level)
    return Interval(mean, len(x), sd, mean - half, mean + half)


def _half_width(sd: float, n: int, level: float) -> float:
    return float(stats.t.ppf((1 + level) / 2, n - 1)) * sd / math.sqrt(n)


def seeds_needed(mean: float, sd: float, band: float, level: float = LEVEL) -> int | None:
    """The least n >= 2 whose interval would clear the band's edge if mean and sd stayed as observed.

    That is a plan, not a promise: both are estimates from few seeds. None if no n up to MOST_SEEDS does.
    """
    room = abs(band - abs(mean))  # from the mean to the nearer edge, on whichever side of it the mean lies
    if not math.isfinite(room) or not math.isfinite(sd) or _half_width(sd, MOST_SEEDS, level) > room:
        return None
    low, high = 1, MOST_SEEDS  # low never fits (n = 1 has no interval), high does; the half width falls with n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _half_width(sd, middle, level) <= room else (middle, high)
    return high


def judge(gap: Interval | None, band: float | None, level: float = LEVEL) -> Verdict:
    """Hold a gap in percent against the band [-band, +band] that was written down before the run."""
    if band is None:
        return Verdict(
            "no band", "the experiment names no equivalence band, so there is nothing to hold the gap against"
        )
    if gap is None:
        return Verdict("cannot tell", "no seed has both this arm and the control finished")
    if not math.isfinite(gap.mean):
        return Verdict("cannot tell", "the gap is not a finite number")
    if gap.low is None:
        return Verdict("cannot tell", "one seed says nothing about the spread; at least 2 are needed to say anything")
    if -band <= gap.low and gap.high <= band:
        return Verdict("inside", f"the whole interval lies within ±{band:g}%")
    if gap.low > band:
        return Verdict("outside", f"the whole interval lies above +{band:g}%")
    if gap.high < -band:
        return Verdict("outside", f"the whole interval lies below -{band:g}%: better than the control")
    needed = seeds_needed(gap.mean, gap.sd, band, level)
    start = f"with {gap.n} seeds the interval crosses the edge of ±{band:g}%"
    if needed is None:
        return Verdict(
            "cannot tell", f"{start}; the mean lies so near the edge that not even {MOST_SEEDS:,} seeds would settle it"
        )
    needed = max(needed, gap.n + 1)
    return Verdict(
        "cannot tell", f"{start}; about {needed:,} would settle it if mean and spread stay as they are", needed
    )


def token_multiplier(
    tokens: Sequence[float], losses: Sequence[float], target: float, spent: float
) -> tuple[float | None, str]:
    """Tokens after which the control's held-out curve first reached `target`, over the tokens `spent` by the arm.

    Linear in log tokens between the two evaluations around it, on the running minimum of the curve (held-out loss is
    noisy; the first time it was reached counts). -> (ratio, "") or (None, why): nothing is extrapolated.
    """
    points = sorted((t, y) for t, y in zip(tokens, losses, strict=True) if t > 0 and is_number(y))
    if len(points) < 2:
        return None, "the control has fewer than two evaluations"
    t = np.array([point[0] for point in points], dtype=np.float64)
    best = np.minimum.accumulate(np.array([point[1] for point in points], dtype=np.float64))
    if target > best[0]:
        return None, f"below {t[0] / spent:.2f}×: passed before the first evaluation"
    if target < best[-1]:
        return None, f"above {t[-1] / spent:.2f}×: not reached by BF16"
    after = int(np.argmax(best <= target))
    if after == 0:
        return float(t[0] / spent), ""
    share = (best[after - 1] - target) / (best[after - 1] - best[after])
    return float(math.exp(math.log(t[after - 1]) + share * math.log(t[after] / t[after - 1])) / spent), ""


def analyze(run: Run) -> Analysis:
    """Everything the report says in numbers."""
    control = run.control
    band = (run.record.get("equivalence") or {}).get("percent")
    problems = [
        f"{job.arm}, seed {job.seed}: {job.state} ({job.why})." for job in run.jobs.values() if not job.finished
    ]
    arms = [_analyze_arm(run, arm, control, band) for arm in run.arms("arm", "noise_floor")]
    for arm in arms:  # jobs that did not finish are named above; these finished and still do not compare
        problems += [
            why
            for seed, why in arm.left_out.items()
            if run.job(arm.name, seed).finished and run.job(control, seed).finished
        ]
    finished = [run.job(control, seed).result["final_loss"] for seed in run.seeds if run.job(control, seed).finished]
    loss = interval(finished)
    spread = 100 * loss.sd / loss.mean if loss and loss.sd is not None and loss.mean > 0 else None
    floors = [
        NoiseFloor(arm.name, arm.gap_percent, float(np.sqrt(np.mean(np.square(arm.gaps_percent)))))
        for arm in arms
        if arm.role == "noise_floor" and arm.gap_percent
    ]
    return Analysis(control, loss, spread, band, floors, arms, problems)


def _pairs(run: Run, arm: str, control: str) -> tuple[list[int], dict[int, str]]:
    """-> seeds where both finished after the same tokens, and a sentence for each other seed."""
    seeds, left_out = [], {}
    for seed in run.seeds:
        ours, theirs = run.job(arm, seed), run.job(control, seed)
        lacking = [f"{job.arm} {job.state}" for job in (ours, theirs) if not job.finished]
        if lacking:
            left_out[seed] = f"Seed {seed} of {arm} is left out: {', '.join(lacking)}."
        elif ours.result["tokens"] != theirs.result["tokens"]:
            left_out[seed] = (
                f"Seed {seed} of {arm} is left out: it ended after {ours.result['tokens']:,} tokens, "
                f"{control} after {theirs.result['tokens']:,} tokens."
            )
        else:
            seeds.append(seed)
    return seeds, left_out


def _analyze_arm(run: Run, arm: dict, control: str, band: float | None) -> ArmStatistics:
    name = arm["name"]
    seeds, left_out = _pairs(run, name, control)
    ours, theirs = [run.job(name, seed) for seed in seeds], [run.job(control, seed) for seed in seeds]
    losses = [job.result["final_loss"] for job in ours]
    control_losses = [job.result["final_loss"] for job in theirs]
    nats = [a - b for a, b in zip(losses, control_losses, strict=True)]
    percent = [_percent(a, b) for a, b in zip(losses, control_losses, strict=True)]
    bytes_per_token = run.record.get("bytes_per_token")
    bits = [gap / math.log(2) / bytes_per_token for gap in nats] if bytes_per_token else []
    forward = [job.result.get("final_loss_bf16_forward") for job in ours]
    if not all(is_number(loss) for loss in forward):
        forward = []  # a mean over some of the pairs would be compared with a mean over all of them
    gap = interval(percent)
    return ArmStatistics(
        name=name,
        recipe=arm["recipe"],
        role=arm["role"],
        seeds=seeds,
        left_out=left_out,
        losses=losses,
        control_losses=control_losses,
        loss=interval(losses),
        loss_bf16_forward=interval(forward),
        gap_nats=interval(nats),
        gap_percent=gap,
        gap_bits_per_byte=interval(bits),
        gap_percent_bf16_forward=interval([_percent(a, b) for a, b in zip(forward, control_losses, strict=False)]),
        gaps_percent=percent,
        multiplier=_multiplier(ours, theirs),
        along=_along(ours, theirs),
        spikes=sum(len(job.spikes) for job in ours),
        control_spikes=sum(len(job.spikes) for job in theirs),
        verdict=judge(gap, band),
    )


def _percent(loss: float, control: float) -> float:
    return 100 * (loss - control) / control if control > 0 else math.nan


def _multiplier(ours: list[Job], theirs: list[Job]) -> Multiplier:
    """Geometric mean over the pairs; if any is out of range there is none (leaving it out would bias the rest)."""
    found = []
    for a, b in zip(ours, theirs, strict=True):
        if not a.evals or not is_number(a.evals[-1]["loss"]):
            return Multiplier(None, f"seed {a.seed} has no evaluation")
        # The arm's last evaluation, not its final loss: the curve it is held against is made of evaluations.
        tokens, losses = [line["tokens"] for line in b.evals], [line["loss"] for line in b.evals]
        found.append(token_multiplier(tokens, losses, a.evals[-1]["loss"], a.evals[-1]["tokens"]))
    if not found:
        return Multiplier(None, "no pair")
    notes = [note for ratio, note in found if ratio is None]
    if notes:
        return Multiplier(None, notes[0] if len(found) == 1 else f"{notes[0]} ({len(notes)} of {len(found)} seeds)")
    logs = interval([math.log(ratio) for ratio, _ in found])
    ends = (None, None) if logs.low is None else (math.exp(logs.low), math.exp(logs.high))
    return Multiplier(Interval(math.exp(logs.mean), logs.n, logs.sd, *ends), "")


def _along(ours: list[Job], theirs: list[Job]) -> list[tuple[int, int, Interval]]:
    """Gap in percent at the steps that every pair has, so that the mean is over the same seeds all along."""
    curves = []
    for a, b in zip(ours, theirs, strict=True):
        below = {line["step"]: line["loss"] for line in b.evals if is_number(line["loss"])}
        curves.append(
            {
                line["step"]: (line["tokens"], _percent(line["loss"], below[line["step"]]))
                for line in a.evals
                if line["step"] in below and is_number(line["loss"])
            }
        )
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(step, curves[0][step][0], interval([curve[step][1] for curve in curves])) for step in steps]
