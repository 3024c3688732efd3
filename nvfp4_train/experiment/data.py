"""Text to tokens to batches.

A corpus is a list of documents (files, rows of a dataset). Documents with equal content are kept once; a document is
wholly training text or wholly held-out text, decided by the hash of its content, so the split is the same on every
machine and no held-out text hides inside a training file. Tokens go to `OUT/data` once and are read from there.

A batch is a pure function of (seed, step): there is no iterator whose state a checkpoint would have to keep.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nvfp4_train.experiment.config import DATA
from nvfp4_train.experiment.errors import ExperimentError, disk_faults
from nvfp4_train.experiment.model import shard_limit
from nvfp4_train.experiment.randomness import generator
from nvfp4_train.experiment.sources import documents, is_held_out_by_name, shard_files
from nvfp4_train.experiment.token_files import TokenFiles, open_tokens

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Experiment
    from nvfp4_train.experiment.sections import DataSection

BYTE_VOCABULARY = 256
CHUNK = 1 << 22  # tokens looked at a time when a shard is checked


class CorpusInfo(NamedTuple):
    """What the record keeps of a corpus. `vocab_size` is None for shards, which do not say; see `bytes_per_token`."""

    source: str
    sha256: str
    documents: int
    train_tokens: int
    held_out_tokens: int
    bytes_per_token: float | None
    vocab_size: int | None
    train: list[str]
    held_out: list[str]


class Corpus:
    """Training and held-out tokens on disk, cut into windows of `sequence_length` + 1 tokens."""

    def __init__(self, info: CorpusInfo, sequence_length: int):
        self.info = info
        self.length = sequence_length
        self._train = TokenFiles(info.train)
        self._held_out = TokenFiles(info.held_out)

    @property
    def sizes(self) -> tuple[int, int]:
        """Training and held-out tokens, as the files have them."""
        return len(self._train), len(self._held_out)

    def train_batch(self, seed: int, step: int, part: int, batch: int, parts: int) -> Tensor:
        """int64 [batch, sequence_length + 1]: microbatch `part` of `parts` of step `step` (0-based).

        Each epoch visits every window once, in an order and at an offset drawn from (seed, epoch).
        """
        windows = (len(self._train) - self.length) // self.length  # one window fewer leaves room for the offset
        first = (step * parts + part) * batch
        starts = []
        for number in range(first, first + batch):
            epoch, place = divmod(number, windows)
            order, offset = _epoch(seed, epoch, windows, self.length)
            starts.append(int(order[place]) * self.length + offset)
        return self._train.windows(starts, self.length + 1)

    def held_out_batches(self, batch: int, count: int) -> list[Tensor]:
        """At most `count` batches, int64 [<= batch, sequence_length + 1]: always the same first held-out windows."""
        windows = min((len(self._held_out) - 1) // self.length, batch * count)
        starts = [w * self.length for w in range(windows)]
        return [self._held_out.windows(starts[i : i + batch], self.length + 1) for i in range(0, windows, batch)]


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, length: int) -> tuple[np.ndarray, int]:
    draws = generator("order", seed, epoch)
    offset = int(torch.randint(0, length, (), generator=draws))
    return torch.randperm(windows, generator=draws).numpy(), offset


class Tokenizer:
    """`bytes`, or a tokenizer.json of the `tokenizers` library; `encode` appends the mark that ends a document."""

    def __init__(self, experiment: Experiment):
        data = experiment.data
        self._tokenizer = self._end = None
        self.vocab_size = BYTE_VOCABULARY
        if (data.tokenizer or "bytes") == "bytes":
            return
        path = experiment.local(data.tokenizer)
        if not path.is_file():
            raise ExperimentError(f"data.tokenizer: there is no file {path}; write bytes or a path to a tokenizer.json")
        try:
            from tokenizers import Tokenizer as Fast

            self._tokenizer = Fast.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ExperimentError(f"data.tokenizer: {path} is no tokenizer.json: {error}") from error
        self.vocab_size = self._tokenizer.get_vocab_size()
        if data.end_of_document is not None:
            self._end = self._tokenizer.token_to_id(data.end_of_document)
            if self._end is None:
                raise ExperimentError(f"data.end_of_document: {path} knows no token {data.end_of_document!r}")

    @property
    def dtype(self) -> type:
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def encode(self, text: bytes) -> np.ndarray:
        if self._tokenizer is None:
            return np.frombuffer(text + b"\0", dtype=np.uint8).astype(np.uint16)
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids if self._end is None else [*ids, self._end], dtype=self.dtype)


def load_corpus(experiment: Experiment, out: Path) -> Corpus:
    """The corpus of an experiment, prepared below `out`/data at the first call; refuses one that is too short."""
    folder = out / DATA
    wanted = json.dumps(experiment.data.model_dump(mode="json"), sort_keys=True)
    if not (folder / "corpus.json").is_file():
        with disk_faults(out):
            _prepare(experiment, folder, wanted)
    try:
        kept = json.loads((folder / "corpus.json").read_text())
        settings, info = kept.pop("settings"), CorpusInfo(**kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ExperimentError(
            f"{folder}/corpus.json is damaged ({error}); delete {folder} to prepare it anew"
        ) from None
    if settings != wanted:
        raise ExperimentError(f"{folder} holds another corpus; choose another --out")
    _refuse_short(experiment, info)
    here = info._replace(
        train=[str(folder / path) for path in info.train], held_out=[str(folder / path) for path in info.held_out]
    )
    corpus = Corpus(here, experiment.data.sequence_length)
    if corpus.sizes != (info.train_tokens, info.held_out_tokens):
        raise ExperimentError(
            f"the tokens of {folder}/corpus.json have changed: {corpus.sizes} training and held-out tokens where "
            f"{(info.train_tokens, info.held_out_tokens)} were; delete {folder} to prepare it anew"
        )
    return corpus


def _prepare(experiment: Experiment, folder: Path, wanted: str) -> None:
    """Writes `folder` whole or not at all; where another job was faster, its result stands."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix="data.", dir=folder.parent))
    scratch = private / DATA  # mkdtemp is for its owner alone; what is made in it follows the umask
    try:
        scratch.mkdir()
        info = _from_shards(experiment) if experiment.data.shards else _from_text(experiment, scratch)
        _refuse_short(experiment, info)
        (scratch / "corpus.json").write_text(json.dumps({"settings": wanted, **info._asdict()}, indent=1))
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / "corpus.json").is_file():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _from_text(experiment: Experiment, scratch: Path) -> CorpusInfo:
    data, tokenizer = experiment.data, Tokenizer(experiment)
    digests: dict[bytes, int] = {}  # content -> bytes, in the order found, duplicates dropped
    held_by_name: set[bytes] = set()
    for name, text in documents(experiment):
        digest = hashlib.sha256(text).digest()
        if digests.setdefault(digest, len(text)) and is_held_out_by_name(experiment, name):
            held_by_name.add(digest)
    if not any(digests.values()):
        raise ExperimentError(f"the corpus is empty: {_describe(data)} holds no text")
    held = held_by_name if isinstance(data.held_out, list) else split(digests, data.held_out)
    if not held or len(held) == len(digests):
        raise ExperimentError(
            f"the corpus cannot be split: held-out text is taken by whole files, and {_describe(data)} leaves "
            f"{len(digests) - len(held)} for training and {len(held)} held out; add files or change data.held_out"
        )
    counts, held_bytes, left = {True: 0, False: 0}, 0, set(digests)
    paths = {True: scratch / "held_out", False: scratch / "train"}
    suffix = ".bin" if tokenizer.dtype is np.uint16 else ".bin32"
    with open(f"{paths[False]}{suffix}", "wb") as train, open(f"{paths[True]}{suffix}", "wb") as held_out:
        for _, text in documents(experiment):
            digest = hashlib.sha256(text).digest()
            if digest not in left:
                continue
            left.remove(digest)
            tokens, is_held = tokenizer.encode(text), digest in held
            (held_out if is_held else train).write(tokens.tobytes())
            counts[is_held] += len(tokens)
            held_bytes += len(text) if is_held else 0
    return CorpusInfo(
        source=_describe(data), sha256=hashlib.sha256(b"".join(digests)).hexdigest(), documents=len(digests),
        train_tokens=counts[False], held_out_tokens=counts[True],
        bytes_per_token=1.0 if tokenizer.vocab_size == BYTE_VOCABULARY else held_bytes / counts[True],
        vocab_size=tokenizer.vocab_size, train=[f"train{suffix}"], held_out=[f"held_out{suffix}"],
    )  # fmt: skip


def split(digests: dict[bytes, int], fraction: float) -> set[bytes]:
    """The held-out documents: by the order of their hashes, as many as fit into `fraction` of the bytes, at least 1."""
    room = fraction * sum(digests.values())
    held: set[bytes] = set()
    for digest in sorted(digests):
        if 0 < digests[digest] <= room:
            room -= digests[digest]
            held.add(digest)
    return held or {min((d for d in digests if digests[d]), key=lambda d: digests[d])}


def _from_shards(experiment: Experiment) -> CorpusInfo:
    data = experiment.data
    train, held_out = shard_files(experiment)
    sha, counts = hashlib.sha256(), []
    limit, key = shard_limit(experiment)
    for files in (train, held_out):
        counts.append(0)
        for path in files:
            tokens = open_tokens(path)
            for i in range(0, len(tokens), CHUNK):
                piece = np.ascontiguousarray(tokens[i : i + CHUNK])
                sha.update(piece)
                if limit is not None and int(piece.max()) >= limit:
                    raise ExperimentError(f"{path}: token {int(piece.max())}, but {key} is {limit}")
            counts[-1] += len(tokens)
    return CorpusInfo(
        source=_describe(data), sha256=sha.hexdigest(), documents=len(train) + len(held_out), train_tokens=counts[0],
        held_out_tokens=counts[1], bytes_per_token=data.bytes_per_token, vocab_size=None,
        train=[str(p) for p in train], held_out=[str(p) for p in held_out],
    )  # fmt: skip


def _describe(data: DataSection) -> str:
    if data.source:
        return "the Python standard library's sources"
    if data.dataset:
        return f"the dataset {data.dataset.path}"
    return " ".join(data.files or data.shards)


def _refuse_short(experiment: Experiment, info: CorpusInfo) -> None:
    length, batch = experiment.data.sequence_length, experiment.training.batch_size
    if info.train_tokens < (batch + 1) * length + 1:
        raise ExperimentError(
            f"the corpus is shorter than one batch: {info.train_tokens} training tokens, but batch_size {batch} x "
            f"sequence_length {length} needs {(batch + 1) * length + 1}; give it more text or make the batch smaller"
        )
    if info.held_out_tokens < length + 1:
        raise ExperimentError(
            f"the held-out text is shorter than one sequence: {info.held_out_tokens} tokens, sequence_length {length}; "
            "raise data.held_out or give it more text"
        )
