"""Results in words: sentences for people, and numbers with as many digits as they deserve."""

import math
from typing import Any

from nvfp4_train.experiment.results import is_number
from nvfp4_train.experiment.statistics import LEVEL, Analysis, ArmStatistics, Interval, Multiplier


def headline(analysis: Analysis) -> str:
    """The answer in one sentence."""
    arms = [arm for arm in analysis.arms if arm.role == "arm"]
    if not arms:
        return "There is no arm to hold against the control."
    if len(arms) == 1:
        return sentence(arms[0], analysis)
    if analysis.band_percent is None:
        return (
            f"{len(arms)} recipes beside BF16; the experiment names no equivalence band, so none of the gaps is judged."
        )
    counts = {kind: sum(arm.verdict.kind == kind for arm in arms) for kind in ("inside", "outside", "cannot tell")}
    words = {"inside": "inside", "outside": "outside", "cannot tell": "cannot be told yet"}
    parts = [f"{count} {words[kind]}" for kind, count in counts.items() if count]
    return (
        f"Of {len(arms)} recipes held against the equivalence band of ±{analysis.band_percent:g}%: {', '.join(parts)}."
    )


def sentence(arm: ArmStatistics, analysis: Analysis) -> str:
    """One arm's result in plain words."""
    gap = arm.gap_percent
    words = {
        "inside": "Inside the band",
        "outside": "Outside the band",
        "cannot tell": "Cannot tell",
        "no band": "Not judged",
    }
    judged = f"{words[arm.verdict.kind]}: {arm.verdict.reason}."
    if gap is None or not math.isfinite(gap.mean):
        return f"{arm.name} has no gap to report. {judged}"
    side = "above" if gap.mean >= 0 else "below"
    spread = (
        f"{LEVEL:.0%} interval {interval_text(gap)}%, {gap.n} seeds"
        if gap.low is not None
        else "one seed, so no interval"
    )
    text = f"{arm.name} ends {percent(gap).lstrip('+−')} {side} BF16 ({spread}). {judged}"
    floors = analysis.noise_floors
    if arm.role == "arm" and floors and abs(gap.mean) < floors[0].rms_percent:
        text += f" The gap is smaller than the noise floor of one run (±{floors[0].rms_percent:.2g}%)."
    return text


def noise_sentence(analysis: Analysis) -> str:
    """What chaos does, and what another seed does."""
    parts = []
    for floor in analysis.noise_floors:
        many = f"over {floor.gap_percent.n} seeds" if floor.gap_percent.n > 1 else "one seed only"
        parts.append(
            f"{floor.arm} is BF16 again from nudged weights: one such run ends ±{floor.rms_percent:.2g}% away from "
            f"its control (root mean square, {many})."
        )
    if not parts:
        parts.append("The noise floor was not measured; an arm with `noise_floor: true` would.")
    if analysis.control_spread_percent is not None:
        parts.append(
            f"From seed to seed the control itself varies by ±{analysis.control_spread_percent:.2g}% "
            "(standard deviation); pairing takes that out of the gap."
        )
    return " ".join(parts)


def multiplier_text(multiplier: Multiplier) -> tuple[str, str]:
    """-> the ratio, and its interval or why there is none."""
    ratio = multiplier.ratio
    if ratio is None:
        return "–", multiplier.note
    return f"{ratio.mean:.2f}×", f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.low is not None else ""


def percent(gap: Interval | None) -> str:
    return "–" if gap is None or not math.isfinite(gap.mean) else signed(gap.mean, _digits(gap)) + "%"


def interval_text(gap: Interval | None) -> str:
    if gap is None or gap.low is None or not math.isfinite(gap.low):
        return ""
    return f"{signed(gap.low, _digits(gap))} to {signed(gap.high, _digits(gap))}"


def gap_note(analysis: Analysis, most_shaded: int) -> str:
    """Ends the caption "mean over the pairs", for there may be an interval or none."""
    arms = [arm for arm in analysis.arms if arm.role == "arm" and arm.gap_percent]
    if not any(arm.gap_percent.low is not None for arm in arms):
        return "; one seed, so there is no interval."
    if len(arms) > most_shaded:
        return "; with so many arms the intervals are shown for the end only, above."
    return f", with its {LEVEL:.0%} interval at each step."


def _digits(gap: Interval) -> int:
    """Two decimals, or as many as the first digit of the half width needs (four at most)."""
    if not gap.half_width or not math.isfinite(gap.half_width):
        return 2
    return min(4, max(2, -math.floor(math.log10(gap.half_width))))


def signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(c in "123456789" for c in text) else text.lstrip("+−")  # zero has no sign


def loss_text(value: float | None) -> str:
    return f"{value:.4f}" if is_number(value) else "–"


def plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    if isinstance(value, int):
        return count(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(inner) for inner in value)
    return str(value)


def count(value: Any) -> str:
    return f"{value:,}" if is_number(value) else "not known"


def duration(seconds: Any) -> str:
    if not is_number(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
