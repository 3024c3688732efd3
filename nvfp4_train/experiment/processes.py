"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened here: after a fork little is safe to do


def die_with_parent() -> None:
    """In the child: even a kill -9 of the parent must not leave jobs behind that its successor would run into."""
    if _LIBC is not None:
        _LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)
