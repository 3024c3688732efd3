"""Runs every job of an experiment that is not finished, some at a time, each in a process of its own.

A job that fails leaves the others alone. Stopping this process stops them too; the same command goes on later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from nvfp4_train.experiment.config import Experiment
from nvfp4_train.experiment.distributed import refuse_indivisible
from nvfp4_train.experiment.errors import ExperimentError, Failure, disk_faults
from nvfp4_train.experiment.processes import die_with_parent
from nvfp4_train.experiment.progress import Display
from nvfp4_train.experiment.record import choose_device, job_folder, prepare_run
from nvfp4_train.experiment.tracking import MetricsReader, check_wandb
from nvfp4_train.experiment.train import failure_of, read_result
from nvfp4_train.explaining.risks import warnings

POLL_SECONDS = 0.3
GRACE_SECONDS = 5.0
# Seed by seed, so that a run cut by time has whole pairs. The control first, because its curve gives the others their
# gap; the noise floor last, because it is the shortest job: what is left over at the end should be short.
ROLE_ORDER = ("control", "arm", "noise_floor")


@dataclass
class JobState:
    """One arm x seed as seen from outside."""

    arm: str
    role: str
    seed: int
    folder: Path
    reader: MetricsReader
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> held-out loss
    process: subprocess.Popen | None = None
    slot: int = 0
    status: str = "waiting"  # waiting | running | finished | failed
    exit_code: int = 0
    message: str = ""

    def update(self) -> None:
        for line in self.reader.new_lines():
            self.step = line["step"]
            if line["kind"] == "train":
                self.loss, self.tokens_per_s = line["loss"], line["tokens_per_s"]
            elif line["kind"] == "eval":
                self.evaluations[line["step"]] = line["loss"]


def compare(experiment: Experiment, out: Path, console: Console) -> list[JobState]:
    """Trains what is missing and returns every job; those that failed say why in `message`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ExperimentError("compare starts its jobs' ranks itself: set parallel.ranks and call it without torchrun")
    refuse_indivisible(experiment, experiment.parallel.ranks)
    check_wandb(experiment)
    for line in _warnings(experiment):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"preparing {out}: text, models, record")
    corpus = prepare_run(experiment, out)
    console.print(
        f"{corpus.info.train_tokens:,} training tokens and {corpus.info.held_out_tokens:,} held out, "
        f"from {corpus.info.source}", markup=False, soft_wrap=True,
    )  # fmt: skip
    turn = lambda job: (experiment.seeds.index(job.seed), ROLE_ORDER.index(job.role))  # noqa: E731
    jobs = sorted(_jobs(experiment, out), key=turn)
    slots, environments = _slots(experiment)
    with _stopped_like_an_interrupt(), Display(console, experiment, jobs) as display:
        try:
            _run(experiment, out, jobs, slots, environments, display)
        finally:
            _stop([job for job in jobs if job.process is not None])
    return jobs


def _warnings(experiment: Experiment) -> list[str]:
    """What is known to go wrong with the recipes, a few lines; `explain` tells the rest."""
    told: dict[str, list[str]] = {}
    for arm in experiment.all_arms:
        for line in warnings(arm.recipe):
            told.setdefault(line, []).append(arm.name)
    return [f"known risk, {', '.join(dict.fromkeys(arms))}: {line}" for line, arms in told.items()]


def _jobs(experiment: Experiment, out: Path) -> list[JobState]:
    jobs = []
    for arm in experiment.all_arms:
        for seed in experiment.seeds:
            folder = job_folder(out, arm.name, seed)
            job = JobState(arm.name, arm.role, seed, folder, MetricsReader(folder / "metrics.jsonl"))
            job.update()
            if (result := read_result(folder)) is not None:
                job.status = result["status"]
                if job.status == "failed":
                    job.exit_code, job.message = 3, _told(failure_of(result, out))
            jobs.append(job)
    return jobs


def _told(failure: Failure) -> str:
    told = f"stopped at step {failure.step}: {failure.tensor}"
    return f"{told}; the last good checkpoint is {failure.checkpoint}" if failure.checkpoint else told


def _slots(experiment: Experiment) -> tuple[int, list[dict[str, str]]]:
    """How many jobs run at a time, and the environment of each slot."""
    threads, ranks = experiment.training.threads, experiment.parallel.ranks
    if choose_device(experiment.training).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        if ranks > len(gpus):
            raise ExperimentError(f"{experiment.path}: parallel.ranks is {ranks}, and there are {len(gpus)} GPUs here")
        shares = [",".join(gpus[i : i + ranks]) for i in range(0, len(gpus) - ranks + 1, ranks)]
        slots = experiment.jobs or len(shares)
        return slots, [{"CUDA_VISIBLE_DEVICES": shares[slot % len(shares)]} for slot in range(slots)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slots = experiment.jobs or max(1, cores // (threads * ranks))
    return slots, [{"OMP_NUM_THREADS": str(threads)} for _ in range(slots)]


def _run(experiment, out: Path, jobs: list[JobState], slots: int, environments: list[dict], display: Display) -> None:
    waiting = [job for job in jobs if job.status == "waiting"]
    free = list(range(slots))
    running: list[JobState] = []
    while waiting or running:
        while waiting and free:
            job = waiting.pop(0)
            job.slot = free.pop(0)
            _start(experiment, out, job, environments[job.slot])
            running.append(job)
            display.started(job)
        time.sleep(POLL_SECONDS)
        for job in list(running):
            code = job.process.poll()
            job.update()
            if code is not None:
                _settle(job, code)
                running.remove(job)
                free.append(job.slot)
                display.ended(job)
        display.refresh()


def _start(experiment: Experiment, out: Path, job: JobState, environment: dict[str, str]) -> None:
    ranks = experiment.parallel.ranks
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [
        sys.executable, "-m", *several, "nvfp4_train.cli", "train", str(experiment.path),
        "--arm", job.arm, "--seed", str(job.seed), "--out", str(out),
    ]  # fmt: skip
    with disk_faults(out):
        job.folder.mkdir(parents=True, exist_ok=True)
        with open(job.folder / "log.txt", "wb") as log:
            job.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **environment}, preexec_fn=die_with_parent,
            )  # fmt: skip
    job.status = "running"


def _settle(job: JobState, code: int) -> None:
    """What became of a job whose process has ended."""
    job.process = None
    result = read_result(job.folder)
    if code == 0 and result is not None:
        job.status = "finished"
        return
    job.status, job.exit_code = "failed", code if code in (2, 3) else 1
    if result is not None and result["failure"]:
        job.exit_code = 3  # torchrun has a code of its own for it
        job.message = _told(failure_of(result, job.folder.parents[1]))
        return
    lines = (job.folder / "log.txt").read_text(errors="replace").strip().splitlines()
    if told := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        job.exit_code, job.message = 2, told[-1]
        return
    last = lines[-1] if lines else "no output"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    job.message = f"{how}: {last} (all of it in {job.folder / 'log.txt'})"


def _stop(jobs: list[JobState]) -> None:
    """Ends the processes of these jobs, and their children (wandb has one)."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                if job.process.poll() is None:
                    os.killpg(job.process.pid, wanted)
        limit = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < limit and any(job.process.poll() is None for job in jobs):
            time.sleep(0.05)


@contextlib.contextmanager
def _stopped_like_an_interrupt():
    """A scheduler's SIGTERM ends this process the way Ctrl-C does: with its jobs."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
