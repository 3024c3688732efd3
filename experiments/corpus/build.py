"""A corpus for pretraining, from source packages, folders or a Hugging Face dataset: each text once, split, tokenized.

    python experiments/corpus/build.py collect --out packs linux-source-6.1.tar.xz ~/projects
    python experiments/corpus/build.py collect --out packs --dataset wikitext --subset wikitext-103-raw-v1
    python experiments/corpus/build.py tokenize --out shards packs/*.tar.xz
    python experiments/corpus/build.py tokenizer --out tokenizer.json packs/*.tar.xz    # the slow part, by itself

``collect`` keeps each text once, by content, and writes it into compressed packs that can travel. ``tokenizer`` trains
a byte-level BPE on a ``--sample`` of them. ``tokenize`` does so too (or takes ``--tokenizer``), sends each document to
training or held-out text by the hash of its content, and writes token shards, ``tokenizer.json`` and ``manifest.json``
(sha256, counts, bytes per token). An experiment reads them as
``data: {shards: [shards/*.npy], held_out: [shards/held_out-*.npy]}``.
All give the same result on every machine, with any number of ``--workers``, for the same texts.
"""

import argparse
import fnmatch
import hashlib
import heapq
import io
import json
import multiprocessing
import os
import sys
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SUFFIXES = (
    ".c .h .cc .cpp .cxx .hpp .cu .cuh .py .pyi .java .rs .go .js .ts .rb .pl .sh .S .s .asm .ad .adb .ads .f90 .scala "
    ".kt .md .rst .txt .texi .adoc .html .po .tex .org .cmake .am .ac .mk .m4 .toml .yaml .yml .cfg .el .lisp .ml .hs"
).split()
# Lists of registers and other tables that a program wrote: gigabytes that teach nothing.
GENERATED = ["*/asic_reg/*", "*_sh_mask.h", "*_offset.h", "*_reg*.h", "*/unicode_data*", "*/testdata/*", "*.min.js"]
SMALLEST, LARGEST = 200, 1 << 20  # bytes of a document
TABLE_SHARE = 0.7  # of the lines: a file of more #defines is a table too
PACK_BYTES = 256 << 20  # of text in one pack
SHARD_TOKENS = 1 << 26
SAMPLE_BYTES = 64 << 20  # of text that the tokenizer is trained on
BATCH_BYTES = 1 << 20  # of text that a worker tokenizes at once
AHEAD = 4  # batches a worker that may wait, so that a corpus need not fit into memory
END = "<|end|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    collecting = commands.add_parser("collect", help="texts to packs")
    collecting.add_argument("sources", nargs="*", type=Path, help="folders, files, tar archives")
    collecting.add_argument("--dataset", help="a name or folder for the datasets library")
    collecting.add_argument("--subset")
    collecting.add_argument("--split", default="train")
    collecting.add_argument("--column", default="text")
    collecting.add_argument("--suffix", nargs="*", default=SUFFIXES, help="endings that are text")
    collecting.add_argument("--exclude", nargs="*", default=GENERATED, help="globs of paths that are left out")
    collecting.add_argument("--limit", type=int, help="bytes of text to stop at")
    collecting.add_argument("--preset", type=int, default=6, help="of xz, 0 to 9")
    collecting.add_argument("--out", type=Path, required=True)
    collecting.set_defaults(command=collect)
    tokenizing = commands.add_parser("tokenize", help="packs to token shards")
    tokenizing.add_argument("packs", nargs="+", type=Path)
    tokenizing.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use as it is")
    tokenizing.add_argument("--held-out", type=float, default=0.005, help="share of the documents")
    tokenizing.add_argument("--workers", type=int, default=_cores(), help="processes, by default one a core")
    tokenizing.set_defaults(command=tokenize)
    training = commands.add_parser("tokenizer", help="packs to a tokenizer.json")
    training.add_argument("packs", nargs="+", type=Path)
    training.set_defaults(command=train_tokenizer, tokenizer=None)
    for command in (tokenizing, training):
        command.add_argument("--vocabulary", type=int, default=16384)
        command.add_argument("--sample", type=int, default=SAMPLE_BYTES, help="bytes of text a tokenizer is trained on")
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        arguments.command(arguments)
    except (OSError, ValueError, tarfile.TarError) as fault:
        sys.exit(f"error: {fault}")


def collect(arguments: argparse.Namespace) -> None:
    if not arguments.sources and not arguments.dataset:
        raise ValueError("give folders, files or archives to collect, or --dataset")
    if any(arguments.out.glob("*.tar.xz")):
        raise ValueError(f"{arguments.out} holds packs already: choose another --out, or delete them")
    arguments.out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    kept = left_out = size = room = 0
    pack = None
    try:
        for name, text in _documents(arguments):
            digest = hashlib.sha256(text).digest()
            if digest in seen or not is_text(text):
                left_out += 1
                continue
            seen.add(digest)
            if pack is None or room < len(text):
                if pack is not None:
                    pack.close()
                number = len(list(arguments.out.glob("*.tar.xz")))
                pack = tarfile.open(arguments.out / f"pack-{number:03}.tar.xz", "w:xz", preset=arguments.preset)
                room = PACK_BYTES
            member = tarfile.TarInfo(name)
            member.size = len(text)
            pack.addfile(member, io.BytesIO(text))
            kept, size, room = kept + 1, size + len(text), room - len(text)
            if arguments.limit and size >= arguments.limit:
                break
    finally:
        if pack is not None:
            pack.close()
    if not kept:
        raise ValueError("no text was found in what was given")
    print(f"{kept} documents, {size / 1e6:.1f} MB; {left_out} left out (duplicates, tables, not text)")


def _documents(arguments: argparse.Namespace) -> Iterator[tuple[str, bytes]]:
    suffixes = tuple(arguments.suffix)

    def wanted(name: str, size: int) -> bool:
        taken = name.endswith(suffixes) and SMALLEST <= size <= LARGEST
        return taken and not any(fnmatch.fnmatchcase(f"/{name}", glob) for glob in arguments.exclude)

    for source in arguments.sources:
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                name = path.relative_to(source).as_posix()
                if path.is_file() and not path.is_symlink() and wanted(name, path.stat().st_size):
                    yield name, path.read_bytes()
        elif source.is_file() and tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                for member in archive:
                    if member.isfile() and wanted(member.name, member.size):
                        yield member.name, archive.extractfile(member).read()
        else:
            yield source.name, source.read_bytes()
    if arguments.dataset:
        from datasets import load_dataset

        for number, row in enumerate(load_dataset(arguments.dataset, arguments.subset, split=arguments.split)):
            if arguments.column not in row:
                raise ValueError(f"{arguments.dataset} has no column {arguments.column!r}; it has {', '.join(row)}")
            yield f"{number}.txt", row[arguments.column].encode()


def is_text(content: bytes) -> bool:
    """Whether it is UTF-8 that a person may have written: no NUL, no table of definitions."""
    if len(content) < SMALLEST or b"\0" in content:
        return False
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        return False
    tables = sum(line.lstrip().startswith(("#define", ".long", ".byte", "0x")) for line in lines)
    return tables <= TABLE_SHARE * len(lines)


def train_tokenizer(arguments: argparse.Namespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    _tokenizer(arguments).save(str(arguments.out))


def tokenize(arguments: argparse.Namespace) -> None:
    if any(arguments.out.glob("*.npy")):
        raise ValueError(f"{arguments.out} holds shards already: choose another --out, or delete them")
    if arguments.workers < 1:
        raise ValueError("--workers must be at least 1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer, path = _tokenizer(arguments), arguments.out / "tokenizer.json"
    end = tokenizer.token_to_id(END)
    if end is None or tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"the tokenizer needs a token {END} and at most 65536 tokens")
    tokenizer.save(str(path))
    shards = {name: Shards(arguments.out, name) for name in ("train", "held_out")}
    bytes_ = dict.fromkeys(shards, 0)
    documents = dict.fromkeys(shards, 0)
    digests = hashlib.sha256()
    for batch, encoded in _encoded(_batches(_packed(arguments.packs)), path, arguments.workers):
        for (digest, text), ids in zip(batch, encoded, strict=True):
            digests.update(digest)
            name = "held_out" if int.from_bytes(digest[:8], "big") < arguments.held_out * 2**64 else "train"
            shards[name].add(ids)
            bytes_[name] += len(text)
            documents[name] += 1
    manifest: dict = {
        "documents_sha256": digests.hexdigest(), "vocabulary": tokenizer.get_vocab_size(),
        "tokenizer_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }  # fmt: skip
    for name, writer in shards.items():
        writer.close()
        if not writer.tokens:
            raise ValueError(f"no document fell into the {name} part: give more text or another --held-out")
        manifest[name] = {
            "documents": documents[name], "bytes": bytes_[name], "tokens": writer.tokens,
            "bytes_per_token": bytes_[name] / writer.tokens, "shards": writer.files,
        }  # fmt: skip
    (arguments.out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(json.dumps({name: {k: v for k, v in manifest[name].items() if k != "shards"} for name in shards}, indent=1))


Document = tuple[bytes, bytes]  # sha256, text


def _encoded(batches: Iterable[list[Document]], tokenizer: Path, workers: int) -> Iterator[tuple[list, list]]:
    """Each batch with its tokens, in order. Processes, because a list of tokens is Python's, which has one lock."""
    spawned = multiprocessing.get_context("spawn")
    waiting: deque = deque()
    with ProcessPoolExecutor(workers, spawned, _begin_worker, (str(tokenizer),)) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, [text for _, text in batch])))
            if len(waiting) > AHEAD * workers:
                batch, future = waiting.popleft()
                yield batch, future.result()
        while waiting:
            batch, future = waiting.popleft()
            yield batch, future.result()


_of_worker: Tokenizer


def _begin_worker(tokenizer: str) -> None:
    global _of_worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _of_worker = Tokenizer.from_file(tokenizer)


def _encode(texts: list[bytes]) -> list[np.ndarray]:
    end = _of_worker.token_to_id(END)
    encoded = _of_worker.encode_batch_fast([text.decode() for text in texts])
    return [np.array([*one.ids, end], dtype=np.uint16) for one in encoded]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Shards:
    """Tokens in files of uint16, each with its sha256."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.files: dict[str, dict] = {}
        self.tokens = 0
        self.pending = np.empty(SHARD_TOKENS, dtype=np.uint16)
        self.filled = 0

    def add(self, tokens: np.ndarray) -> None:
        while len(tokens):
            taken = tokens[: SHARD_TOKENS - self.filled]
            self.pending[self.filled : self.filled + len(taken)] = taken
            self.filled += len(taken)
            tokens = tokens[len(taken) :]
            if self.filled == SHARD_TOKENS:
                self.close()

    def close(self) -> None:
        if self.filled:
            path = self.folder / f"{self.name}-{len(self.files):03}.npy"
            np.save(path, self.pending[: self.filled])
            self.files[path.name] = {
                "tokens": self.filled, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }  # fmt: skip
            self.tokens += self.filled
            self.filled = 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    if arguments.tokenizer:
        return Tokenizer.from_file(str(arguments.tokenizer))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocabulary, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_sample(arguments.packs, arguments.sample), trainer)
    return tokenizer


def _sample(packs: list[Path], size: int) -> list[str]:
    """Documents of the smallest hashes, ``size`` bytes at most: from every pack, and in one reading of them."""
    kept: list[tuple[bytes, bytes]] = []  # a heap whose first is the next to go: the largest hash
    total = 0
    for _, text in _packed(packs):
        inverted = bytes(255 - byte for byte in hashlib.sha256(b"sample" + text).digest())
        heapq.heappush(kept, (inverted, text))
        total += len(text)
        while total > size and len(kept) > 1:
            total -= len(heapq.heappop(kept)[1])
    return [text.decode() for _, text in sorted(kept)]


def _packed(packs: list[Path]) -> Iterator[Document]:
    """Every text of the packs, each once."""
    seen: set[bytes] = set()
    for path in sorted(packs):
        with tarfile.open(path) as archive:
            for member in archive:
                text = archive.extractfile(member).read()
                digest = hashlib.sha256(text).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield digest, text


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    main()
