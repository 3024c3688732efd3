"""Text, tokens, batches: split by document, once an epoch, and a pure function of (seed, step)."""

import hashlib
import json
import os

import numpy as np
import pytest
import torch
from tiny_experiment import tiny, write_text

from nvfp4_train.experiment.data import load_corpus, split
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.model import build_model


def tokens_of(out, name):
    return np.fromfile(out / "data" / f"{name}.bin", dtype=np.uint16)


def test_a_document_is_wholly_on_one_side(tmp_path):
    load_corpus(tiny(tmp_path, {"data.held_out": 0.25}), tmp_path / "out")
    sides = [bytes(tokens_of(tmp_path / "out", name).astype(np.uint8)) for name in ("train", "held_out")]
    texts = [path.read_bytes() for path in sorted((tmp_path / "text").iterdir())]
    where = [[text in side for side in sides] for text in texts]
    assert all(sum(row) == 1 for row in where)
    assert 1 <= sum(row[1] for row in where) <= 0.25 * len(texts)
    assert sum(map(len, sides)) == sum(map(len, texts)) + len(texts)  # each ends with byte 0


def test_equal_documents_count_once(tmp_path):
    first = load_corpus(tiny(tmp_path), tmp_path / "a").info
    for path in list((tmp_path / "text").iterdir()):
        (tmp_path / "text" / f"copy of {path.name}").write_bytes(path.read_bytes())
    second = load_corpus(tiny(tmp_path), tmp_path / "b").info
    assert (second.documents, second.train_tokens) == (first.documents, first.train_tokens)


def test_the_split_depends_on_content_only():
    digests = {hashlib.sha256(bytes([i])).digest(): 100 for i in range(40)}
    held = split(digests, 0.1)
    assert len(held) == 4
    assert split(dict(reversed(digests.items())), 0.1) == held
    assert len(split(dict(list(digests.items())[:2]), 0.01)) == 1  # at least one


def test_the_hash_tells_corpora_apart(tmp_path):
    first = load_corpus(tiny(tmp_path), tmp_path / "a").info.sha256
    (tmp_path / "text" / "00.txt").write_text("one more word")
    second = load_corpus(tiny(tmp_path), tmp_path / "b").info.sha256
    assert len(first) == 64 and first != second


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    experiment = tiny(tmp_path)
    one, two = load_corpus(experiment, tmp_path / "out"), load_corpus(experiment, tmp_path / "out")
    forward = [one.train_batch(1, step, 0, 2, 1) for step in range(6)]
    backward = [two.train_batch(1, step, 0, 2, 1) for step in reversed(range(6))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert not torch.equal(forward[0], one.train_batch(2, 0, 0, 2, 1))
    assert not torch.equal(forward[0], forward[1])


def test_microbatches_are_the_rows_of_one_big_batch(tmp_path):
    corpus = load_corpus(tiny(tmp_path), tmp_path / "out")
    whole = corpus.train_batch(1, 3, 0, 6, 1)
    parts = torch.cat([corpus.train_batch(1, 3, part, 2, 3) for part in range(3)])
    assert torch.equal(whole, parts)


def test_an_epoch_visits_every_window_once(tmp_path):
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.zeros(100, dtype=np.uint16).tofile(tmp_path / "b.bin")
    data = {"shards": ["a.bin", "b.bin"], "sequence_length": 32}
    corpus = load_corpus(tiny(tmp_path, {"data": data, "model.config.vocab_size": 3000}), tmp_path / "out")
    windows = (3000 - 32) // 32
    for epoch in range(2):
        rows = torch.cat([corpus.train_batch(1, epoch * windows + n, 0, 1, 1) for n in range(windows)])
        starts = rows[:, 0]
        assert torch.equal(rows, starts[:, None] + torch.arange(33))
        assert starts.sort().values.diff().unique().tolist() == [32]  # no gap, no overlap but the one shared target
        assert not torch.equal(starts, starts.sort().values)


def test_held_out_batches_are_whole_and_bounded(tmp_path):
    corpus = load_corpus(tiny(tmp_path), tmp_path / "out")
    tokens = tokens_of(tmp_path / "out", "held_out")
    few = corpus.held_out_batches(2, 3)
    assert [tuple(batch.shape) for batch in few] == [(2, 33)] * 3
    assert few[0][1].tolist() == tokens[32:65].tolist()
    everything = corpus.held_out_batches(2, 10**6)
    assert sum(map(len, everything)) == (len(tokens) - 1) // 32


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([path.read_text() for path in sorted((folder / "text").iterdir())], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_tokenizer_json(tmp_path):
    write_text(tmp_path / "text")
    tokenizer = write_tokenizer(tmp_path)
    changes = {"data.tokenizer": "tokenizer.json", "data.end_of_document": "<end>"}
    info = load_corpus(tiny(tmp_path, changes), tmp_path / "out").info
    tokens = tokens_of(tmp_path / "out", "held_out")
    assert info.vocab_size == tokenizer.get_vocab_size()
    assert tokens[-1] == tokenizer.token_to_id("<end>")
    held_bytes = len(tokenizer.decode(tokens.tolist()).encode())
    assert info.bytes_per_token == held_bytes / len(tokens)
    assert info.bytes_per_token > 1.5
    with pytest.raises(ExperimentError, match="knows no token '<eos>'"):
        load_corpus(tiny(tmp_path, changes | {"data.end_of_document": "<eos>"}), tmp_path / "other")


def test_shards_are_read_as_one_array(tmp_path):
    numbers = np.arange(3000, dtype=np.uint16) % 200
    numbers[:1000].tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", numbers[1000:2000])
    numbers[2000:].tofile(tmp_path / "c.bin")
    changes = {
        "data": {"shards": ["*.bin", "*.npy"], "sequence_length": 32, "bytes_per_token": 3.5},
        "model.config.vocab_size": 200,
    }
    corpus = load_corpus(tiny(tmp_path, changes), tmp_path / "out")
    assert (corpus.info.train_tokens, corpus.info.held_out_tokens, corpus.info.bytes_per_token) == (2000, 1000, 3.5)
    rows = torch.cat([corpus.train_batch(1, n, 0, 1, 1) for n in range(61)])
    assert torch.equal(rows[:, 1:], (rows[:, :-1] + 1) % 200)  # also where a window spans two shards
    with pytest.raises(ExperimentError, match="token 199, but model.config.vocab_size is 150"):
        load_corpus(tiny(tmp_path, changes | {"model.config.vocab_size": 150}), tmp_path / "other")


def test_held_out_by_globs(tmp_path):
    corpus = load_corpus(tiny(tmp_path, {"data.held_out": ["text/0[01].txt"]}), tmp_path / "out")
    expected = sum(len((tmp_path / "text" / f"0{i}.txt").read_bytes()) + 1 for i in (0, 1))
    assert corpus.info.held_out_tokens == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset(tmp_path, streaming):
    pytest.importorskip("datasets")
    rows = [{"text": f"row number {i} " * 20} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = {"path": "json", "data_files": ["rows.jsonl"], "documents": 30, "streaming": streaming}
    changes = {"data": {"dataset": dataset, "sequence_length": 32}}
    info = load_corpus(tiny(tmp_path, changes), tmp_path / "out").info
    assert info.documents == 30
    assert info.train_tokens + info.held_out_tokens == sum(len(row["text"]) + 1 for row in rows[:30])


def test_the_standard_library(tmp_path):
    from nvfp4_train.experiment.sources import documents

    names = [name for name, _ in documents(tiny(tmp_path, {"data": {"source": "stdlib", "sequence_length": 32}}))]
    assert len(names) > 300 and names == sorted(names)
    assert any(name.endswith("argparse.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)


@pytest.mark.parametrize(
    "texts, changes, told",
    [
        ([], {}, "no file matches"),
        (["", ""], {}, "the corpus is empty"),
        (["a" * 5000], {}, "cannot be split"),
        (["a" * 60, "b" * 60], {}, "shorter than one batch"),
        (["a" * 5000, "b" * 20], {"data.held_out": 0.001}, "held-out text is shorter than one sequence"),
        (["a" * 5000, "b" * 500], {"data.tokenizer": "none.json"}, "there is no file .*none.json"),
        (["a" * 5000, "b" * 500], {"data.tokenizer": "tiny.yaml"}, "is no tokenizer.json"),
    ],
)
def test_a_corpus_that_cannot_be_is_refused_and_nothing_is_left(tmp_path, texts, changes, told):
    experiment = tiny(tmp_path, changes)
    for path in (tmp_path / "text").iterdir():
        path.unlink()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    with pytest.raises(ExperimentError, match=told):
        load_corpus(experiment, tmp_path / "out")
    assert not (tmp_path / "out" / "data").exists()


def test_shards_beyond_the_vocabulary_of_a_checkpoint(tmp_path):
    build_model(tiny(tmp_path), 1, 256).config.save_pretrained(tmp_path / "model")
    (np.arange(3000) % 256).astype(np.uint16).tofile(tmp_path / "a.bin")
    data = {"shards": ["a.bin", "b.bin"], "sequence_length": 32}
    experiment = tiny(tmp_path, {"data": data, "model": {"checkpoint": "model"}})
    np.full(100, 255, dtype=np.uint16).tofile(tmp_path / "b.bin")
    load_corpus(experiment, tmp_path / "fits")
    np.full(100, 256, dtype=np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(ExperimentError, match="b.bin: token 256, but the vocab_size of model.checkpoint is 256"):
        load_corpus(experiment, tmp_path / "out")


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("corpus.json", "", "corpus.json is damaged"),
        ("corpus.json", "{}", "corpus.json is damaged"),
        ("train.bin", None, "train.bin cannot be read"),
        ("train.bin", "ab", "have changed"),
        ("train.bin", "abc", "train.bin: 3 bytes"),
    ],
)
def test_a_damaged_data_folder_is_told(tmp_path, name, content, told):
    experiment = tiny(tmp_path)
    load_corpus(experiment, tmp_path / "out")
    path = tmp_path / "out" / "data" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ExperimentError, match=told):
        load_corpus(experiment, tmp_path / "out")


def test_the_data_folder_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        load_corpus(tiny(tmp_path), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "data").stat().st_mode & 0o777 == 0o750
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["data"]
