"""The signed Hadamard transform on a tile, in the order of operations of ``reference/hadamard.py``."""

import triton
import triton.language as tl
from nvfp4_kernels.triton import packed


@triton.jit
def rotate(x, N: tl.constexpr, MASK: tl.constexpr, FACTOR: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """int16 bits of every N neighbours of float32 ``x`` [I, J] transformed and rounded to bfloat16."""
    HEIGHT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = _butterflies(x, N, MASK, ALONG_ROWS, N.bit_length() - 1)
    # Apart and together again: four neighbours of a row become neighbouring registers, as the steps that work on
    # packed values want them.
    even, odd = tl.split(tl.reshape(x, (HEIGHT, WIDTH // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x = tl.join(tl.join(a * FACTOR, c * FACTOR), tl.join(b * FACTOR, d * FACTOR))
    return packed.rounded_bits(tl.reshape(x, (HEIGHT, WIDTH)))


@triton.jit
def largest_candidates(x, N: tl.constexpr, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """Half as many numbers with the same largest magnitude as the transform of ``x`` [I, J] without its factor.

    Of a + b and a - b, the last butterfly, the larger has the magnitude |a| + |b|, and rounding keeps the order.
    [I / 2, J], or [I, J / 2] if ``ALONG_ROWS``; NaN or Inf where the transform has either.
    """
    HEIGHT: tl.constexpr = x.shape[0] if ALONG_ROWS else x.shape[0] // 2
    WIDTH: tl.constexpr = x.shape[1] // 2 if ALONG_ROWS else x.shape[1]
    DISTANCE: tl.constexpr = N // 2 if ALONG_ROWS else N // 2 * WIDTH
    a, b = _apart(_butterflies(x, N, MASK, ALONG_ROWS, N.bit_length() - 2), DISTANCE)
    return tl.reshape(tl.abs(a) + tl.abs(b), (HEIGHT, WIDTH))


@triton.jit
def _butterflies(x, N: tl.constexpr, MASK: tl.constexpr, ALONG_ROWS: tl.constexpr, STAGES: tl.constexpr):
    """Signs and the first ``STAGES`` butterflies of every N neighbours of float32 ``x`` [I, J].

    ``ALONG_ROWS``: neighbours within a row (axis 1), else within a column (axis 0).
    """
    HEIGHT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    LENGTH: tl.constexpr = WIDTH if ALONG_ROWS else HEIGHT
    INNER: tl.constexpr = 1 if ALONG_ROWS else WIDTH  # elements between two neighbours
    index = tl.arange(0, LENGTH) & (N - 1)
    signs = 1.0 - 2.0 * ((MASK >> index) & 1).to(tl.float32)
    x = x * (signs[None, :] if ALONG_ROWS else signs[:, None])
    for stage in tl.static_range(STAGES):
        x = _stage(x, INNER * 2**stage)
    return tl.reshape(x, (HEIGHT, WIDTH))


@triton.jit
def _apart(x, DISTANCE: tl.constexpr):
    pairs: tl.constexpr = (x.numel // (2 * DISTANCE), 2, DISTANCE)
    return tl.split(tl.permute(tl.reshape(x, pairs), (0, 2, 1)))


@triton.jit
def _stage(x, DISTANCE: tl.constexpr):
    """(a, b) -> (a + b, a - b) for every two elements that lie ``DISTANCE`` apart in the row-major order of ``x``."""
    a, b = _apart(x, DISTANCE)
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))
