"""Token files of .bin, .bin32 and .npy: memory maps that are read as one array, and whose faults have a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nvfp4_train.experiment.errors import ExperimentError


class TokenFiles:
    """Several token files read as one array, without loading them."""

    def __init__(self, paths: list[str]):
        self._arrays = [open_tokens(Path(path)) for path in paths]
        self._ends = np.cumsum([len(array) for array in self._arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._arrays) else 0

    def windows(self, starts: list[int], length: int) -> Tensor:
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts, strict=True):
            filled, file = 0, int(np.searchsorted(self._ends, start, side="right"))
            begin = start - (int(self._ends[file - 1]) if file else 0)
            while filled < length:
                piece = self._arrays[file][begin : begin + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, file, begin = filled + len(piece), file + 1, 0
        return torch.from_numpy(rows)


def open_tokens(path: Path) -> np.ndarray:
    """A 1-D memory map: .npy of uint16 or uint32, .bin of uint16, .bin32 of uint32."""
    try:
        return _open_tokens(path)
    except (OSError, EOFError) as error:
        raise ExperimentError(f"the token file {path} cannot be read ({error}); restore it") from None
    except ValueError as error:
        if isinstance(error, ExperimentError):
            raise
        raise ExperimentError(f"the token file {path} is damaged ({error}); restore it") from None


def _open_tokens(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1:
            raise ExperimentError(f"{path}: expected a 1-D array of uint16, found {tokens.dtype} {tokens.shape}")
        return tokens
    kind = np.uint32 if path.suffix == ".bin32" else np.uint16
    size = path.stat().st_size
    if size % np.dtype(kind).itemsize:
        raise ExperimentError(f"{path}: {size} bytes are no whole number of {np.dtype(kind).name} tokens")
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
