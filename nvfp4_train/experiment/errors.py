"""What can go wrong for the user of an experiment, each as one sentence that names the thing and the remedy.

`ExperimentError` is the only exception a user is meant to see; the command line prints it and exits with 2.
`TrainingStopped` is not the user's fault: the numbers of one arm became non-finite (exit code 3).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ExperimentError(ValueError):
    """Something the user can put right: the message names it and says how."""


class Failure(NamedTuple):
    """Where the numbers of an arm broke."""

    step: int
    tensor: str
    checkpoint: str | None


class TrainingStopped(Exception):
    """A loss or gradient was not finite; training cannot go on."""

    def __init__(self, arm: str, seed: int, failure: Failure):
        self.failure = failure
        kept = f"the last good checkpoint is {failure.checkpoint}" if failure.checkpoint else "no checkpoint was kept"
        super().__init__(f"arm {arm!r}, seed {seed}: stopped at step {failure.step}: {failure.tensor}; {kept}")


@contextlib.contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Turns a full or read-only disk into one sentence; every other OSError passes unchanged."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full; free some space",
            errno.EDQUOT: "your disk quota is used up; free some space",
            errno.EROFS: "the disk is read-only; choose another --out",
            errno.ENOTDIR: "a part of the path is a file; choose another --out",
            errno.EACCES: "permission denied; choose another --out",
        }
        if error.errno not in reasons:
            raise
        raise ExperimentError(
            f"cannot write below {folder}: {reasons[error.errno]} and run the same command again "
            "(it goes on from the last whole checkpoint)"
        ) from error
