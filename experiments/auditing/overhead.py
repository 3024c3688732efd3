"""What `audit: {every: N}` costs: the time inside the monitor over the time of the training between two audits.

    python experiments/auditing/overhead.py experiments/quickstart.yaml [--every 500] [--steps 40] [--device cpu]

Steps are timed one by one in the running job, the monitor's share by wrapping its methods; medians, since other work on
the machine only ever adds. The job is real: the experiment's model, text and first quantized arm.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from nvfp4_train.experiment.config import AuditSection, load_experiment
from nvfp4_train.experiment.record import job_folder, prepare_run
from nvfp4_train.experiment.train import Job


def timed(job: Job, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step without the monitor, and of the monitor in each audited step with the window after it."""
    spent = [0.0]

    def clock() -> float:
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrap(name: str) -> None:
        whole = getattr(job.monitor, name)

        def measured(*arguments):
            begin = clock()
            result = whole(*arguments)
            spent[0] += clock() - begin
            return result

        setattr(job.monitor, name, measured)

    for name in ("before_update", "after_update"):
        wrap(name)
    plain, audits = [], []
    while job.step < steps:
        before, begin = spent[0], clock()
        audited = job.monitor.due(job.step)
        job._step()
        own = spent[0] - before
        (audits if audited else plain).append((clock() - begin - own, own))
    step = statistics.median(seconds for seconds, _ in plain)
    # an audited step measures its operands as they run: what it takes beyond other steps is the monitor's, too
    inside = [seconds - step + own for seconds, own in audits[1:]]
    windows = sum(own for _, own in plain) / max(len(audits) - 1, 1)
    return [step], [statistics.median(inside) + windows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--steps", type=int, default=61)
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    experiment = load_experiment(options.experiment)
    object.__setattr__(experiment, "audit", AuditSection(every=12))  # often, to measure it often
    if options.device:
        object.__setattr__(experiment.training, "device", options.device)
    arm = next(arm for arm in experiment.all_arms if not arm.recipe.quantizes_nothing)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        corpus = prepare_run(experiment, out)
        job = Job(experiment, arm.name, experiment.seeds[0], job_folder(out, arm.name, experiment.seeds[0]), corpus)
        (step,), (audit,) = timed(job, options.steps)
    share = audit / (options.every * step)
    print(f"step {1000 * step:.1f} ms, one audit {1000 * audit:.1f} ms = {audit / step:.1f} steps")
    print(f"every {options.every} steps: {100 * share:.2f}% of the run")


if __name__ == "__main__":
    main()
