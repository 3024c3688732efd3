"""Metrics of a job: always lines of JSON, and wandb where the experiment asks for it.

`metrics.jsonl` survives a kill: a checkpoint remembers how long the file was, and a resumed job cuts it back to that.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_train.experiment.errors import ExperimentError, disk_faults

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Experiment


class MetricsLog:
    """Appends lines to metrics.jsonl, beginning at byte `offset`: what stands behind it is cut off."""

    def __init__(self, path: Path, offset: int):
        self._path = path
        with disk_faults(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab")  # noqa: SIM115 - lives as long as the job
            self._file.truncate(offset)

    def write(self, line: dict[str, Any]) -> None:
        with disk_faults(self._path.parent):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()

    def settle(self) -> int:
        """Waits until every line is on the disk; the length of the file."""
        with disk_faults(self._path.parent):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class MetricsReader:
    """Follows a metrics.jsonl that another process writes: each call gives the lines that are new and whole."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # cut back by a resume: the lines come again
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            # A file cut back and grown past the old place again is read from the middle of a line: the rest follows.
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def check_wandb(experiment: Experiment) -> None:
    """Raises before any training if wandb is asked for but missing, or online without a login."""
    wanted = experiment.tracking.wandb
    if wanted is None:
        return
    try:
        import wandb
    except ImportError:
        raise ExperimentError(
            "tracking.wandb needs wandb: pip install 'nvfp4-train[wandb]', or leave the key out"
        ) from None
    if wanted.mode == "online" and not wandb.api.api_key:
        raise ExperimentError(
            "tracking.wandb.mode is online but nobody is logged in to wandb: run 'wandb login', or set mode: offline"
        )


class WandbRun:
    """One job as a wandb run that a resume goes on with; does nothing where the experiment does not ask for wandb."""

    def __init__(self, experiment: Experiment, arm: str, seed: int, folder: Path):
        wanted = experiment.tracking.wandb
        self._run = None
        if wanted is None:
            return
        import wandb

        self._run = wandb.init(
            project=wanted.project, mode=wanted.mode, dir=str(folder), id=f"{experiment.name}-{arm}-{seed}",
            name=f"{arm} seed {seed}", group=experiment.name, config=experiment.resolved(),
            resume="allow" if wanted.mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def write(self, line: dict[str, Any]) -> None:
        if self._run is not None:
            kind, step = line["kind"], line["step"]
            numbers = {f"{kind}/{k}": v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
            self._run.log(numbers, step=step)

    def close(self, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)
