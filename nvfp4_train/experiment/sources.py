"""Where documents come from: the standard library, files, a dataset, token shards. Always the same order."""

from __future__ import annotations

import fnmatch
import glob
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_train.experiment.errors import ExperimentError

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Experiment

# Not text of the standard library itself, or not on every machine (Debian leaves the tests out).
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Names under which `datasets` reads the user's own files.
LOCAL_FORMATS = {"json", "text", "csv", "parquet", "arrow"}


def documents(experiment: Experiment) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every document, duplicates included."""
    data = experiment.data
    if data.dataset is not None:
        yield from _dataset_rows(experiment)
        return
    for path in _stdlib_files() if data.source == "stdlib" else _matching(experiment, data.files, "data.files"):
        try:
            yield str(path), path.read_bytes()
        except OSError as error:
            raise ExperimentError(f"data: cannot read {path}: {error.strerror}") from error


def is_held_out_by_name(experiment: Experiment, name: str) -> bool:
    globs = experiment.data.held_out
    return isinstance(globs, list) and _matches(experiment, globs, Path(name))


def shard_files(experiment: Experiment) -> tuple[list[Path], list[Path]]:
    """Training and held-out shards: by globs, or the last ones in name order up to the fraction, at least one."""
    data = experiment.data
    files = _matching(experiment, data.shards, "data.shards")
    if isinstance(data.held_out, list):
        held_out = [path for path in files if _matches(experiment, data.held_out, path)]
    else:
        held_out = files[len(files) - max(1, int(len(files) * data.held_out)) :]
    train = [path for path in files if path not in held_out]
    if not train or not held_out:
        raise ExperimentError(
            f"data.shards: held-out tokens are taken by whole shards, and this leaves {len(train)} for training and "
            f"{len(held_out)} held out; give at least two shards, or name the held-out ones in data.held_out"
        )
    return train, held_out


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not NOT_STDLIB.intersection(p.relative_to(root).parts))
    if not files:
        raise ExperimentError(f"data.source: this Python has no library sources in {root}; give data.files instead")
    return files


def _matching(experiment: Experiment, patterns: list[str], key: str) -> list[Path]:
    """The files of globs and folders, sorted and each once; a pattern without any file is an error."""
    found: set[Path] = set()
    for pattern in patterns:
        root = experiment.local(pattern)
        if root.is_dir():
            new = {p for p in root.rglob("*") if p.is_file()}
        else:
            new = {Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()}
        if not new:
            raise ExperimentError(f"{key}: no file matches {root}")
        found |= new
    return sorted(found)


def _matches(experiment: Experiment, globs: list[str], path: Path) -> bool:
    return any(fnmatch.fnmatchcase(str(path), str(experiment.local(pattern))) for pattern in globs)


def _dataset_rows(experiment: Experiment) -> Iterator[tuple[str, bytes]]:
    wanted = experiment.data.dataset
    rows = _open_dataset(experiment)
    for number, row in enumerate(rows):
        if wanted.documents is not None and number >= wanted.documents:
            return
        if not isinstance(row.get(wanted.column), str):
            raise ExperimentError(
                f"data.dataset.column: {wanted.path} has no text column {wanted.column!r}; it has {', '.join(row)}"
            )
        yield str(number), row[wanted.column].encode()


def _open_dataset(experiment: Experiment):
    wanted = experiment.data.dataset
    try:
        import datasets
    except ImportError:
        raise ExperimentError("data.dataset needs the datasets library: pip install 'nvfp4-train[data]'") from None
    folder = experiment.local(wanted.path)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            return loaded[wanted.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        files = wanted.data_files
        if files and wanted.path in LOCAL_FORMATS:
            files = [str(path) for path in _matching(experiment, files, "data.dataset.data_files")]
        path = str(folder) if folder.exists() else wanted.path
        return datasets.load_dataset(
            path, wanted.subset, split=wanted.split, data_files=files, streaming=wanted.streaming
        )
    except ExperimentError:
        raise
    except Exception as error:  # a missing split, a missing file and a missing network all come as different errors
        raise ExperimentError(f"data.dataset: {wanted.path} cannot be opened: {error}") from error
