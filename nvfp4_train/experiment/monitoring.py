"""`audit: {every: 500}`: numbers of the operands and warnings, written while a job trains.

    {"kind": "audit", "step": 500, "fprop.input/sqnr_db": 20.4, ..., "grad_to_noise": 9.1, "layers": {...}}
    {"kind": "audit_weights", "step": 508, "oscillating": 0.001}
    {"kind": "warning", "step": 500, "check": "underflow", "text": "..."}

Measured is the first microbatch of an audited step, while it trains. The noise of the gradient takes two more passes
over that microbatch, which leave nothing behind: every microbatch has random numbers of its own. Between audits, and in
a job without them, nothing is installed anywhere.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from nvfp4_train import ledger
from nvfp4_train.auditing.meters import OperandMeter, OperandNumbers, WeightWatch
from nvfp4_train.auditing.trends import Trends
from nvfp4_train.conditions import grad_to_noise
from nvfp4_train.conversion import converted_layers
from nvfp4_train.layer_state import load_quantizer_state, quantizer_state
from nvfp4_train.linear import QuantizedLinear

Write = Callable[..., None]  # Job._write: kind and numbers


class Monitor:
    """Audits one job every so many steps. `folder`: the job's, in a run folder where its control's stands too."""

    def __init__(
        self, model: nn.Module, every: int, folder: Path, control: str, noise_floor: str | None, write: Write,
        announce: Callable[[str], None],
    ):  # fmt: skip
        self.model, self.every = model, every
        self.folder, self.control, self.noise_floor = folder, control, noise_floor
        self.write, self.announce = write, announce
        self.trends = Trends()
        self._meter: OperandMeter | None = None
        self._weights: WeightWatch | None = None
        for line in _lines(folder / "metrics.jsonl"):
            if line.get("kind") == "audit":
                self.trends.restore(line)

    @classmethod
    def of(cls, job: Any) -> Monitor:
        """The monitor of a `train.Job`."""
        roles = {arm.role: arm.name for arm in job.experiment.all_arms}
        return cls(
            job.model, job.experiment.audit.every, job.folder, roles["control"], roles.get("noise_floor"), job._write,
            job.announce,
        )  # fmt: skip

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint must hold so that the lines after a resume are those of a job that never stopped."""
        return None if self._weights is None else self._weights.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._weights = self._watch_weights()
            self._weights.restore(state)

    def due(self, step: int) -> bool:
        """Whether the step after `step` steps is audited: the first one, and every so many."""
        return step % self.every == 0

    @contextlib.contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the first microbatch of a step."""
        if not self.due(step):
            yield
            return
        self._meter = OperandMeter()
        with ledger.observing(self._meter):
            yield

    def before_update(self, step: int, again: Callable[[], object] | None) -> None:
        """Before the optimizer's step. `again` runs the first microbatch once more, forward and backward, eagerly; None
        where that cannot be done (a job on several ranks)."""
        if not self.due(step):
            return
        numbers = {} if self._meter is None else self._meter.numbers()
        self._meter = None
        ratio = None
        if again is not None:
            state = quantizer_state(self.model)
            if not numbers:  # a replayed graph runs no Python: look at the same microbatch outside of it
                meter = OperandMeter()
                with ledger.observing(meter):
                    ratio = grad_to_noise(self.model, again)
                numbers = meter.numbers()
            else:
                ratio = grad_to_noise(self.model, again)
            load_quantizer_state(self.model, state)
        ratio = None if ratio == float("inf") else ratio
        layers: dict[str, dict[str, OperandNumbers]] = {}
        for (layer, operand), row in numbers.items():
            layers.setdefault(layer, {})[operand] = row
        self.write(kind="audit", **flat(numbers), grad_to_noise=ratio, layers=layers)
        self._warn(self.trends.operands(numbers))
        self._warn(self.trends.noise(ratio))
        if self._weights is None:  # a window longer than the time between two audits runs to its end
            self._weights = self._watch_weights()

    def _watch_weights(self) -> WeightWatch:
        layers = converted_layers(self.model).items()
        whole = {n: layer for n, layer in layers if isinstance(layer, QuantizedLinear) and not layer.sharded_at_rest}
        return WeightWatch(whole)

    def after_update(self) -> None:
        """After the optimizer's step, of every step: weights are watched for a few of them after an audit."""
        if self._weights is not None and self._weights.after_step():
            shares = self._weights.shares()
            self._weights = None
            if shares:
                mean, worst = sum(shares.values()) / len(shares), max(shares, key=shares.__getitem__)
                self.write(kind="audit_weights", oscillating=mean, worst=shares[worst], worst_layer=worst)
                self._warn(self.trends.oscillation(shares))

    def after_evaluation(self, step: int, loss: float) -> None:
        """Compares with the control of the same seed, as far as it has got."""
        control = self._evaluations(self.control).get(step)
        if control is None:
            return
        floor = None
        if self.noise_floor is not None:
            mine, base = self._evaluations(self.noise_floor), self._evaluations(self.control)
            gaps = [abs(mine[at] / base[at] - 1) for at in mine.keys() & base.keys() if at <= step]
            floor = max(gaps, default=None)
        self._warn(self.trends.gap(step, loss / control - 1, floor))

    def spike(self, loss: float) -> None:
        self._warn([("spike", f"the loss jumped to {loss:.3f}, far above those of the last steps")])

    def _evaluations(self, arm: str) -> dict[int, float]:
        path = self.folder.parents[1] / arm / self.folder.name / "metrics.jsonl"
        return {line["step"]: line["loss"] for line in _lines(path) if line.get("kind") == "eval"}

    def _warn(self, found: Any) -> None:
        for check, text in found:
            self.write(kind="warning", check=check, text=text)
            self.announce(f"warning: {text}")


def flat(numbers: dict[tuple[str, str], OperandNumbers]) -> dict[str, float]:
    """`operand/number`: the mean over the layers; of the amax and the outliers the largest."""
    found: dict[str, float] = {}
    for operand in dict.fromkeys(operand for _, operand in numbers):
        rows = [row for (_, name), row in numbers.items() if name == operand]
        for key in OperandNumbers._fields:
            values = [value for row in rows if (value := getattr(row, key)) is not None]
            if values:
                found[f"{operand}/{key}"] = max(values) if key in ("amax", "outlier") else sum(values) / len(values)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line
