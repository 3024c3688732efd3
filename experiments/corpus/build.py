"""A corpus for pretraining, from source packages, folders or a Hugging Face dataset: each text once, split, tokenized.

    python experiments/corpus/build.py collect --out packs linux-source-6.1.tar.xz ~/projects
    python experiments/corpus/build.py collect --out packs --dataset wikitext --subset wikitext-103-raw-v1
    python experiments/corpus/build.py tokenize --out shards packs/*.tar.xz

``collect`` keeps each text once, by content, and writes it into compressed packs that can travel. ``tokenize`` trains a
byte-level BPE on them (or takes ``--tokenizer``), sends each document to training or held-out text by the hash of its
content, and writes token shards, ``tokenizer.json`` and ``manifest.json`` (sha256, counts, bytes per token). An
experiment reads them as ``data: {shards: [shards/*.npy], held_out: [shards/held_out-*.npy]}``.
Both give the same result on every machine for the same texts.
"""

import argparse
import fnmatch
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Iterator
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
TRAINER_BYTES = 200 << 20  # of text that the tokenizer is trained on
BATCH = 1024  # documents tokenized at once
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
    tokenizing.add_argument("--vocabulary", type=int, default=16384)
    tokenizing.add_argument("--held-out", type=float, default=0.005, help="share of the documents")
    tokenizing.add_argument("--out", type=Path, required=True)
    tokenizing.set_defaults(command=tokenize)
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


def tokenize(arguments: argparse.Namespace) -> None:
    if any(arguments.out.glob("*.npy")):
        raise ValueError(f"{arguments.out} holds shards already: choose another --out, or delete them")
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(arguments)
    end = tokenizer.token_to_id(END)
    if end is None or tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"the tokenizer needs a token {END} and at most 65536 tokens")
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    shards = {name: Shards(arguments.out, name) for name in ("train", "held_out")}
    bytes_ = dict.fromkeys(shards, 0)
    documents = dict.fromkeys(shards, 0)
    digests = hashlib.sha256()
    for batch in _batches(_packed(arguments.packs)):
        for text, encoded in zip(batch, tokenizer.encode_batch([text.decode() for text in batch]), strict=True):
            digest = hashlib.sha256(text).digest()
            digests.update(digest)
            name = "held_out" if int.from_bytes(digest[:8], "big") < arguments.held_out * 2**64 else "train"
            shards[name].add([*encoded.ids, end])
            bytes_[name] += len(text)
            documents[name] += 1
    manifest: dict = {"documents_sha256": digests.hexdigest(), "vocabulary": tokenizer.get_vocab_size()}
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


class Shards:
    """Tokens in files of uint16, each with its sha256."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.files: dict[str, dict] = {}
        self.tokens = 0
        self.pending = np.empty(SHARD_TOKENS, dtype=np.uint16)
        self.filled = 0

    def add(self, ids: list[int]) -> None:
        tokens = np.asarray(ids, dtype=np.uint16)
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
    tokenizer.train_from_iterator(_sample(arguments.packs), trainer)
    return tokenizer


def _sample(packs: list[Path]) -> Iterator[str]:
    """Documents chosen by their hash, so that no pack is left out, up to ``TRAINER_BYTES``."""
    total = sum(len(text) for text in _packed(packs))
    share = min(1.0, TRAINER_BYTES / max(total, 1))
    for text in _packed(packs):
        if int.from_bytes(hashlib.sha256(b"sample" + text).digest()[:8], "big") <= share * 2**64:
            yield text.decode()


def _packed(packs: list[Path]) -> Iterator[bytes]:
    """Every text of the packs, each once."""
    seen: set[bytes] = set()
    for path in sorted(packs):
        with tarfile.open(path) as archive:
            for member in archive:
                text = archive.extractfile(member).read()
                digest = hashlib.sha256(text).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield text


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


if __name__ == "__main__":
    main()
