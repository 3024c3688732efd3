"""The signed Hadamard transform on a tile, in the order of operations of ``reference/hadamard.py``."""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs


@triton.jit
def rotate(x, N: tl.constexpr, MASK: tl.constexpr, FACTOR: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """Every N neighbours of float32 ``x`` [I, J] transformed and rounded to bfloat16 (held in float32)."""
    HEIGHT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = butterflies(x, N, MASK, ALONG_ROWS)
    # Apart and together again: four neighbours of a row become neighbouring registers, as the steps that work on
    # packed values want them.
    even, odd = tl.split(tl.reshape(x, (HEIGHT, WIDTH // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x = tl.join(tl.join(a * FACTOR, c * FACTOR), tl.join(b * FACTOR, d * FACTOR))
    return codecs.round_to_bfloat16(tl.reshape(x, (HEIGHT, WIDTH)))


@triton.jit
def butterflies(x, N: tl.constexpr, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """Signs and butterflies of every N neighbours of float32 ``x`` [I, J], without the factor 1 / sqrt(N).

    ``ALONG_ROWS``: neighbours within a row (axis 1), else within a column (axis 0).
    """
    HEIGHT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    LENGTH: tl.constexpr = WIDTH if ALONG_ROWS else HEIGHT
    INNER: tl.constexpr = 1 if ALONG_ROWS else WIDTH  # elements between two neighbours
    index = tl.arange(0, LENGTH) & (N - 1)
    signs = 1.0 - 2.0 * ((MASK >> index) & 1).to(tl.float32)
    x = x * (signs[None, :] if ALONG_ROWS else signs[:, None])
    LOG_N: tl.constexpr = N.bit_length() - 1
    for stage in tl.static_range(LOG_N):
        x = _stage(x, INNER * 2**stage)
    return tl.reshape(x, (HEIGHT, WIDTH))


@triton.jit
def _stage(x, DISTANCE: tl.constexpr):
    """(a, b) -> (a + b, a - b) for every two elements that lie ``DISTANCE`` apart in the row-major order of ``x``."""
    pairs: tl.constexpr = (x.numel // (2 * DISTANCE), 2, DISTANCE)
    a, b = tl.split(tl.permute(tl.reshape(x, pairs), (0, 2, 1)))
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))
