"""Philox4x32-7: random bits that depend on a key and on the element's index, and on nothing else.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); seven rounds is the
fewest that they found to pass BigCrush. PyTorch has no usable unsigned 64-bit arithmetic, so the 32-bit words live
in int64 tensors: the low 64 bits of a product are the same signed or unsigned.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 0xFFFFFFFF
DRAWS_PER_CALL = 8  # four words, two 16-bit numbers each
CALLS_AT_ONCE = 16384  # on a CPU: so many keep their int64 words in its cache, which halves the time


def philox4x32_7(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor | int]) -> list[Tensor]:
    """Four 32-bit words per counter.

    ``counter``: four int64 tensors that broadcast, each in [0, 2^32). ``key``: two numbers in [0, 2^32), 0-d
    int64 or int. Returns four int64 tensors in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # The low words c1, c3 keep rubbish above bit 32 until the next mask: they are only ever xored.
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = p1, p0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return [c0, c1 & WORD, c2, c3 & WORD]


def random16(seed: Tensor, stream: int, count: int, first: int = 0) -> Tensor:
    """The 16-bit numbers of elements first .. first + count - 1, as uint16 ``[count]`` on the device of ``seed``.

    Element n draws from counter (n // 8, 0, 0) under key (seed, stream); its lane n % 8 is word lane // 2, low half
    for an even lane. ``seed``: int64 0-d, the low 32 bits are used.
    """
    skipped = first % DRAWS_PER_CALL
    start = first // DRAWS_PER_CALL
    calls = (skipped + count + DRAWS_PER_CALL - 1) // DRAWS_PER_CALL
    at_once = CALLS_AT_ONCE if seed.device.type == "cpu" else max(calls, 1)
    out = torch.empty(calls, 4, dtype=torch.int32, device=seed.device)
    for done in range(0, calls, at_once):
        end = min(done + at_once, calls)
        _draw(torch.arange(start + done, start + end, device=seed.device), start + end, seed, stream, out[done:end])
    return out.view(torch.uint16).view(-1)[skipped : skipped + count]  # little-endian: the low half comes first


def random16_rows(seed: Tensor, stream: int, rows: int, columns: int, first: int, width: int) -> Tensor:
    """uint16 ``[rows, columns]``: at (i, j) the number of element first + i * width + j (see ``random16``).

    For a part of a tensor that is ``width`` wide, at which the part begins with element ``first``.
    """
    starts = first + width * torch.arange(rows, device=seed.device)
    calls = (columns + 2 * DRAWS_PER_CALL - 2) // DRAWS_PER_CALL  # enough for a row that begins on any lane
    index = (starts // DRAWS_PER_CALL).unsqueeze(1) + torch.arange(calls, device=seed.device)
    out = torch.empty(rows, calls, 4, dtype=torch.int32, device=seed.device)
    last = (first + width * max(rows - 1, 0)) // DRAWS_PER_CALL + calls
    _draw(index, last, seed, stream, out)
    numbers = out.view(torch.int16).view(rows, calls * DRAWS_PER_CALL)
    lanes = (starts % DRAWS_PER_CALL).unsqueeze(1) + torch.arange(columns, device=seed.device)
    return numbers.gather(1, lanes).view(torch.uint16)


def _draw(index: Tensor, end: int, seed: Tensor, stream: int, out: Tensor) -> None:
    """Four words for each call ``index`` (all below ``end``), into int32 ``out [..., 4]``."""
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    high = zero if end <= WORD else index >> 32  # a 0-d word makes the first round nearly free
    low = index if end <= WORD else index & WORD
    for position, word in enumerate(philox4x32_7((low, high, zero, zero), (seed & WORD, stream & WORD))):
        out[..., position] = word  # keeps the low 32 bits
