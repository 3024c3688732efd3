"""Launch configuration: which tile a program takes. Found by the sweep in experiments/2026-11-30_kernels on one H200.

A tile spans the 16 (or 32) rows of one column block where there is a column form, and is wide enough for its warps to
stand side by side: then all elements of a column block lie in one thread, and neither the block's amax nor the
Hadamard butterflies cross threads.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    vector: int = 0  # neighbours of a row in one thread, for the column form; 0: 16 bytes of them
    registers: int = 0  # at most for a thread; 0: as many as the compiler likes
    each: int = 4  # tiles one above the other that a program of a quantize kernel makes
    ahead: bool = False  # asks for the next tile while it works on one; outputs leave the cache first


TABLE = {  # kind of work -> tile for a large tensor
    "rows": Tile(16, 128, 2),
    "square": Tile(16, 256, 2, each=1),
    "columns": Tile(16, 128, 1, vector=4, registers=128),
    "columns_stochastic": Tile(16, 128, 1, vector=4, registers=168, ahead=True),
    "columns_packed": Tile(16, 128, 1, vector=4, registers=128, ahead=True),
    "both_packed_stochastic": Tile(16, 512, 4, vector=4),  # for FP4 tensor cores; compiled, not measured
    "amax": Tile(16, 1024, 4),
    "amax_rotated": Tile(16, 512, 2),
    "decode": Tile(16, 512, 8),
}
# Each program of the amax walks down its columns: few enough that their atomics cost nothing.
AMAX_PROGRAMS = {"amax": 132 * 32, "amax_rotated": 132 * 32}
# A program of a quantize kernel divides twice before its first tile: cheaper once for several of them, unless memory is
# what it waits for. Fewer tiles where the programs would have fewer warps than this together.
LEAST_WARPS = 132 * 32


def strips(tile: Tile, tiles_i: int, tiles_j: int) -> int:
    """How many programs share a column of tiles."""
    return min(tiles_i, max(-(-tiles_i // tile.each), -(-LEAST_WARPS // (tile.warps * tiles_j))))


def fit(kind: str, height: int, width: int, rows: int = 16) -> Tile:
    """The tile of ``kind`` for a tensor [height, width]: at least ``rows`` rows, not much wider than the tensor."""
    tile = TABLE[kind]
    columns, warps = tile.columns, tile.warps
    if rows > tile.rows:  # as many elements for a thread as before, in a column twice as long
        tile, columns = tile._replace(registers=0), columns // 2
    # a narrower tile where the last one of a row would be mostly padding
    while columns > 64 and -(-width // columns) * columns > max(1.125 * width, 64):
        columns, warps = columns // 2, max(1, warps // 2)
    return tile._replace(rows=max(tile.rows, rows), columns=columns, warps=warps)
