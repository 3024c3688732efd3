"""What `compare` shows while it runs: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from nvfp4_train.experiment.compare import JobState
    from nvfp4_train.experiment.config import Experiment

LINE_SECONDS = 10.0


class Display:
    """Loss, tokens/s, gap so far and time left of each running job; a line for each that ends."""

    def __init__(self, console: Console, experiment: Experiment, jobs: list[JobState]):
        self._console, self._jobs, self._total = console, jobs, experiment.total_steps
        self._tokens_per_step = experiment.tokens_per_step
        self._controls = {job.seed: job for job in jobs if job.role == "control"}
        self._began = self._said = time.monotonic()
        self._steps_at_start = sum(job.step for job in jobs)
        self._bars = None
        self._tasks: dict[int, int] = {}
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"), TimeElapsedColumn(), console=console, transient=True,
            )  # fmt: skip

    def __enter__(self) -> Display:
        done = sum(job.status != "waiting" for job in self._jobs)
        if done:
            self._say(f"{done} of {len(self._jobs)} jobs are done already")
        if self._bars is not None:
            self._bars.start()
            self._all = self._bars.add_task("all jobs", total=len(self._jobs) * self._total, numbers="")
        return self

    def __exit__(self, *_) -> None:
        if self._bars is not None:
            self._bars.stop()

    def started(self, job: JobState) -> None:
        if self._bars is not None:
            self._tasks[id(job)] = self._bars.add_task(_name(job), total=self._total, completed=job.step, numbers="")
        else:
            self._say(f"{_name(job)}: {'goes on' if job.step else 'starts'}")

    def ended(self, job: JobState) -> None:
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(id(job)))
        if job.status == "finished":
            loss = f", held-out loss {job.evaluations[max(job.evaluations)]:.4f}" if job.evaluations else ""
            self._say(f"{_name(job)}: finished{loss}{_gap_text(self.gap(job))}")
        else:
            self._say(f"{_name(job)}: FAILED: {job.message}")

    def refresh(self) -> None:
        if self._bars is not None:
            for job in self._jobs:
                if id(job) in self._tasks:
                    self._bars.update(self._tasks[id(job)], completed=job.step, numbers=self._numbers(job))
            steps = sum(job.step for job in self._jobs)
            self._bars.update(self._all, completed=steps, numbers=self._time_left())
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            for job in self._jobs:
                if job.status == "running":
                    self._say(f"{_name(job)}: step {job.step}/{self._total}  {self._numbers(job)}")
            if left := self._time_left():
                self._say(f"all jobs: {left}")

    def gap(self, job: JobState) -> float | None:
        """Percent above the control of the same seed, at the last evaluation that both have."""
        control = self._controls.get(job.seed)
        if control is None or control is job:
            return None
        shared = job.evaluations.keys() & control.evaluations.keys()
        if not shared:
            return None
        ours, theirs = job.evaluations[max(shared)], control.evaluations[max(shared)]
        return 100.0 * (ours - theirs) / theirs

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _numbers(self, job: JobState) -> str:
        if job.loss is None or not job.tokens_per_s:
            return "starting"
        left = (self._total - job.step) * self._tokens_per_step / job.tokens_per_s
        return f"loss {job.loss:.3f}  {job.tokens_per_s:,.0f} tokens/s{_gap_text(self.gap(job))}  {_clock(left)} left"

    def _time_left(self) -> str:
        """From the pace so far; jobs that failed have nothing left to do."""
        steps = sum(job.step for job in self._jobs) - self._steps_at_start
        left = sum(self._total - job.step for job in self._jobs if job.status in ("waiting", "running"))
        spent = time.monotonic() - self._began
        return f"about {_clock(spent * left / steps)} left" if steps > 0 else ""


def _name(job: JobState) -> str:
    return f"{job.arm} seed {job.seed}"


def _gap_text(gap: float | None) -> str:
    return "" if gap is None else f"  gap {gap:+.2f}%"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
