"""Philox4x32-7: known answers, an independent implementation, and the numbering of elements."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_kernels.reference import philox
from nvfp4_kernels.reference.philox import philox4x32_7, random16

WORD = st.integers(0, 2**32 - 1)

# The three seven-round vectors of Random123 1.14 (kat_vectors): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def oracle(counter: list[int], key: list[int]) -> list[int]:
    """Python integers, straight from the paper's definition: no masks that could hide a carry."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def ours(counter: list[int], key: list[int]) -> list[int]:
    words = philox4x32_7(tuple(torch.tensor([word]) for word in counter), (torch.tensor(key[0]), key[1]))
    return [int(word) for word in words]


def test_known_answers():
    for counter, key, output in KNOWN:
        counter, key, output = ([int(word, 16) for word in text.split()] for text in (counter, key, output))
        assert oracle(counter, key) == output
        assert ours(counter, key) == output


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_against_integers(counter, key):
    assert ours(counter, key) == oracle(counter, key)


@given(seed=st.integers(-(2**63), 2**63 - 1), stream=WORD, count=st.integers(0, 70))
@settings(max_examples=50, deadline=None)
def test_numbering(seed, stream, count):
    """Element n: counter (n // 8, 0, 0, 0), lane n % 8, low half first; the seed's low 32 bits."""
    numbers = random16(torch.tensor(seed), stream, count)
    assert numbers.shape == (count,) and numbers.dtype == torch.uint16
    want = []
    for n in range(count):
        word = oracle([n // 8, 0, 0, 0], [seed % 2**32, stream])[n % 8 // 2]
        want.append(word >> 16 if n % 2 else word & 0xFFFF)
    assert numbers.tolist() == want


def test_a_long_run_goes_on_across_its_pieces(monkeypatch):
    seed = torch.tensor(11)
    whole = random16(seed, 3, 1001).tolist()
    assert random16(seed, 3, 100).tolist() == whole[:100]
    monkeypatch.setattr(philox, "CALLS_AT_ONCE", 7)
    assert random16(seed, 3, 1001).tolist() == whole


def test_the_counter_has_a_high_word():
    """Element 2^35 + 8 would be call 2^32 + 1: too many to draw here, so the words are given."""
    assert ours([1, 1, 0, 0], [5, 6]) == oracle([1, 1, 0, 0], [5, 6]) != oracle([1, 0, 0, 0], [5, 6])


def test_seeds_and_streams_differ_and_numbers_are_uniform():
    draw = {key: random16(torch.tensor(key[0]), key[1], 1 << 17).numpy().astype(np.float64) for key in
            ((1, 0), (2, 0), (1, 1))}
    for numbers in draw.values():
        # Mean of 2^17 uniforms on 0..65535: standard deviation 65536 / sqrt(12 * 2^17) = 52.
        assert abs(numbers.mean() - 32767.5) < 5 * 52.3
        counts = np.bincount((numbers // 256).astype(int), minlength=256)
        assert abs(((counts - 512) ** 2 / 512).sum() - 255) < 5 * np.sqrt(2 * 255)  # chi-square, 255 degrees
    for a, b in (((1, 0), (2, 0)), ((1, 0), (1, 1))):
        assert abs(np.corrcoef(draw[a], draw[b])[0, 1]) < 5 / np.sqrt(1 << 17)
