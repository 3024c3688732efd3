"""The quantize kernel: one tile of x in, every form of it that is asked for out."""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs, codecs_sm100, packed, scales
from nvfp4_kernels.triton.hadamard import rotate
from nvfp4_kernels.triton.philox import inverted_draws


@triton.jit
def _form(
    x, bits, up16, s_enc_6, s_dec, lift, codes_ptr, scales_ptr, operand_ptr, i0, j0, height, width, padded_i, padded_j,
    EXACT: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr, ALONG_ROWS: tl.constexpr,
    RULE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, ROUNDING: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, FACTOR: tl.constexpr, ORDINARY: tl.constexpr,
    CONVERT: tl.constexpr, XORSIGN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One form of the tile ``x`` float32 [BI, BJ] at (i0 int64, j0), in blocks of BR x BC of x; stored where asked.

    ``bits``: x in bfloat16, at least its signs, or all of it if EXACT.
    """
    BI: tl.constexpr = x.shape[0]
    BJ: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = (BI // BR, BR, BJ // BC, BC)
    if N > 0:
        bits = rotate(x, N, MASK, FACTOR, ALONG_ROWS)
        x = packed.widened(bits, True)
    block_amax = _block_amax(x, bits, BR, BC, VECTOR, EXACT or N > 0, ALONG_ROWS, XORSIGN)  # [BI / BR, BJ / BC]
    x = tl.reshape(x, blocks)
    bits = tl.reshape(bits, blocks)
    if RULE == "nvfp4":
        scale, encode = scales.nvfp4_scales(block_amax, s_enc_6, s_dec, lift, ORDINARY)
        if not ORDINARY:
            x = x * lift
    else:
        scale, encode = scales.mx_scales(block_amax, RULE == "ceil")
    encode = encode[:, None, :, None]

    if ROUNDING > 0:
        y = x * encode
        up16 = tl.reshape(up16, blocks)
    if operand_ptr is not None:
        if ROUNDING > 0:
            scale_bits = tl.broadcast_to(codecs.bfloat16_bits(scale)[:, None, :, None], blocks)
            value = codecs.stochastic_operand(y, up16, scale_bits, ROUNDING == 2, XORSIGN)
        else:
            wide: tl.constexpr = RULE != "nvfp4"
            value = packed.nearest_operand(
                x, bits, tl.broadcast_to(encode, blocks), tl.broadcast_to(scale[:, None, :, None], blocks), wide
            )
        value = tl.reshape(value, (BI, BJ))
        operand_i = padded_i if N > 0 else height
        operand_j = padded_j if N > 0 else width
        _store(operand_ptr, value, i0, j0, operand_i, operand_j, VECTOR, EVEN, not ALONG_ROWS, AHEAD)
    if codes_ptr is not None:
        keep = tl.where(scale == scale, 0xFF, 0).to(tl.uint8)[:, None, :, None]  # no code means NaN, the scale does
        if ROUNDING == 2 and CONVERT == 2:  # by the instruction for it
            low, high = _pairs(y, ALONG_ROWS)
            low_up16, high_up16 = _pairs(up16, ALONG_ROWS)
            keep = tl.broadcast_to(keep, low.shape)
            pair = codecs_sm100.stochastic_codes(low, high, low_up16, high_up16, keep, True, CONVERT)
        elif ROUNDING > 0:
            code = codecs.e2m1_code(codecs.e2m1_stochastic(y, up16, ROUNDING == 2))
            low, high = _pairs(code, ALONG_ROWS)
            pair = (low | (high << 4)).to(tl.uint8) & keep
        elif CONVERT > 0:
            low, high = _pairs(x * encode, ALONG_ROWS)
            pair = codecs_sm100.nearest_codes(low, high, tl.broadcast_to(keep, low.shape), CONVERT)
        else:
            low, high = _pairs(x, ALONG_ROWS)
            low_bits, high_bits = _pairs(bits, ALONG_ROWS)
            pair = packed.nearest_codes(
                low, high, low_bits, high_bits, tl.broadcast_to(encode, low.shape), tl.broadcast_to(keep, low.shape)
            )
        if ALONG_ROWS:
            pair = tl.reshape(pair, (BI, BJ // 2))
            _store(codes_ptr, pair, i0, j0 // 2, height, padded_j // 2, VECTOR // 2, EVEN, False, AHEAD)
        else:
            pair = tl.reshape(pair, (BI // 2, BJ))
            _store(codes_ptr, pair, i0 // 2, j0, padded_i // 2, width, VECTOR, EVEN, True, AHEAD)
        byte = (codecs.e4m3_byte(scale) if RULE == "nvfp4" else codecs.e8m0_byte(scale)).to(tl.uint8)
        _store(scales_ptr, byte, i0 // BR, j0 // BC, padded_i // BR, padded_j // BC, 8, EVEN, not ALONG_ROWS, AHEAD)


@triton.jit
def _block_amax(
    x, bits, BR: tl.constexpr, BC: tl.constexpr, VECTOR: tl.constexpr, EXACT: tl.constexpr,
    ALONG_ROWS: tl.constexpr, XORSIGN: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each block, float32 [BI / BR, BJ / BC]; NaN where one is."""
    BI: tl.constexpr = x.shape[0]
    BJ: tl.constexpr = x.shape[1]
    WAY: tl.constexpr = 0 if not EXACT else 1 if BC == 1 else 2 if ALONG_ROWS else 0
    if WAY == 1:
        found = tl.abs(codecs.to_float32(packed.largest_of_rows(tl.reshape(bits, (BI // BR, BR, BJ)), XORSIGN), True))
    else:
        if WAY == 2:
            x = codecs.to_float32(packed.largest_of_runs(bits, VECTOR, XORSIGN), True)
        blocks: tl.constexpr = (BI // BR, BR, BJ // BC, x.shape[1] * BC // BJ)
        found = codecs.largest_magnitude(codecs.largest_magnitude(tl.reshape(x, blocks), 3), 1)
    return found


@triton.jit
def _pairs(x, ALONG_ROWS: tl.constexpr):
    """The elements of ``x`` [blocks, BR, blocks, BC] with even and with odd index along the rows, or the columns."""
    BI: tl.constexpr = x.shape[0]
    BR: tl.constexpr = x.shape[1]
    BJ: tl.constexpr = x.shape[2]
    BC: tl.constexpr = x.shape[3]
    if ALONG_ROWS:
        return tl.split(tl.reshape(x, (BI, BR, BJ, BC // 2, 2)))
    else:
        return tl.split(tl.permute(tl.reshape(x, (BI, BR // 2, 2, BJ, BC)), (0, 1, 3, 4, 2)))


@triton.jit
def _load(
    pointer, stride, i0, j0, height, width,
    BI: tl.constexpr, BJ: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """The tile at (i0, j0) as it is stored, zeros outside; a thread holds VECTOR neighbours of a row."""
    pointers, inside = _places(pointer, stride, i0, j0, height, width, BI, BJ, VECTOR, DEEP)
    tile = tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0)
    return tl.reshape(tile, (BI, BJ))


@triton.jit
def _store(
    pointer, tile, i0, j0, height, width,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, DEEP: tl.constexpr, FIRST_OUT: tl.constexpr,
):  # fmt: skip
    """``tile`` at (i0, j0) of a contiguous [height, width], VECTOR elements at once: as a thread holds them.

    FIRST_OUT: it leaves the cache before what will be read again.
    """
    BI: tl.constexpr = tile.shape[0]
    BJ: tl.constexpr = tile.shape[1]
    pointers, inside = _places(pointer, width, i0, j0, height, width, BI, BJ, VECTOR, DEEP)
    tile = tl.reshape(tile, pointers.shape)
    if EVEN:
        tl.store(pointers, tile, cache_modifier=".cs" if FIRST_OUT else "")
    else:
        tl.store(pointers, tile, mask=inside)


@triton.jit
def _places(
    pointer, stride, i0, j0, height, width,
    BI: tl.constexpr, BJ: tl.constexpr, VECTOR: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """(pointers, which are inside) of a tile [BI, BJ] at (i0, j0), or [1, BI, BJ] if DEEP.

    The compiler gives all tiles of one shape, between which it sees a connection, one layout: the widest. The column
    form, which wants another than the row form, takes another shape.
    """
    base = pointer + i0 * stride + j0  # one for the tile: what is left needs 32 bits
    i = tl.arange(0, BI)
    j = tl.max_contiguous(tl.arange(0, BJ), VECTOR)
    below = height - i0
    right = width - j0
    if DEEP:
        pointers = base + (i[None, :, None] * stride + j[None, None, :])
        inside = (i < below)[None, :, None] & (j < right)[None, None, :]
    else:
        pointers = base + (i[:, None] * stride + j[None, :])
        inside = (i < below)[:, None] & (j < right)[None, :]
    return pointers, inside


@triton.jit
def _fetch_ahead(
    pointer, stride, i0, j0, height, width, BI: tl.constexpr, BJ: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Asks for the lines of the tile at (i0, j0), LINE elements each, which costs no registers: it will be next."""
    if not codecs.INTERPRETED:
        i = tl.minimum(i0 + tl.arange(0, BI), height - 1)
        j = tl.minimum(j0 + tl.arange(0, BJ // LINE) * LINE, width - 1)
        pointers = pointer + i[:, None] * stride + j[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def _tile(
    i0, j0, x_ptr, seed_ptr, height, width, stride, row_stream, column_stream, draw_i, draw_j, draw_width,
    row_s_enc_6, row_s_dec, row_lift, row_codes, row_scales, row_operand,
    column_s_enc_6, column_s_dec, column_lift, column_codes, column_scales, column_operand,
    BF16_BITS: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    ROW_VECTOR: tl.constexpr, COLUMN_VECTOR: tl.constexpr, BY_EIGHTS: tl.constexpr, ONE_DRAW: tl.constexpr,
    ROWS: tl.constexpr, ROW_RULE: tl.constexpr, ROW_BR: tl.constexpr, ROW_BC: tl.constexpr,
    ROW_ROUNDING: tl.constexpr, ROW_N: tl.constexpr, ROW_MASK: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMN_RULE: tl.constexpr, COLUMN_BR: tl.constexpr, COLUMN_BC: tl.constexpr,
    COLUMN_ROUNDING: tl.constexpr, COLUMN_N: tl.constexpr, COLUMN_MASK: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    CONVERT: tl.constexpr, XORSIGN: tl.constexpr, AHEAD: tl.constexpr, ORDINARY: tl.constexpr,
):  # fmt: skip
    """The tile of this program, in all the forms that are asked for."""
    up16 = 0
    if ROWS:
        if ROW_ROUNDING > 0:
            up16 = inverted_draws(
                tl.load(seed_ptr), row_stream, i0 + draw_i, j0 + draw_j, draw_width, BI, BJ, BY_EIGHTS
            )
        raw = _load(x_ptr, stride, i0, j0, height, width, BI, BJ, ROW_VECTOR, EVEN, False)
        GROUP: tl.constexpr = ROW_N if ROW_N > ROW_BC else ROW_BC
        _form(
            packed.widened(raw, BF16_BITS), codecs.high_bits(raw, BF16_BITS), up16, row_s_enc_6, row_s_dec, row_lift,
            row_codes, row_scales, row_operand, i0, j0, height, width,
            height if EVEN else tl.cdiv(height, ROW_BR) * ROW_BR, width if EVEN else tl.cdiv(width, GROUP) * GROUP,
            BF16_BITS, EVEN, ROW_VECTOR, True, ROW_RULE, ROW_BR, ROW_BC, ROW_ROUNDING, ROW_N, ROW_MASK, ROW_FACTOR,
            ORDINARY, CONVERT, XORSIGN, AHEAD,
        )  # fmt: skip
    if COLUMNS:
        if COLUMN_ROUNDING > 0:
            if not ONE_DRAW:
                up16 = inverted_draws(
                    tl.load(seed_ptr), column_stream, i0 + draw_i, j0 + draw_j, draw_width, BI, BJ, BY_EIGHTS
                )
        GROUP_I: tl.constexpr = COLUMN_N if COLUMN_N > COLUMN_BR else COLUMN_BR
        # loaded anew (from the cache): to keep the tile takes more registers than there are
        raw = _load(x_ptr, stride, i0, j0, height, width, BI, BJ, COLUMN_VECTOR, EVEN, True)
        _form(
            packed.widened(raw, BF16_BITS), codecs.high_bits(raw, BF16_BITS), up16,
            column_s_enc_6, column_s_dec, column_lift, column_codes, column_scales, column_operand,
            i0, j0, height, width, height if EVEN else tl.cdiv(height, GROUP_I) * GROUP_I,
            width if EVEN else tl.cdiv(width, COLUMN_BC) * COLUMN_BC,
            BF16_BITS, EVEN, COLUMN_VECTOR, False, COLUMN_RULE, COLUMN_BR, COLUMN_BC, COLUMN_ROUNDING,
            COLUMN_N, COLUMN_MASK, COLUMN_FACTOR, ORDINARY, CONVERT, XORSIGN, AHEAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["strips", "row_stream", "column_stream", "draw_i", "draw_j", "draw_width"])
def quantize_kernel(
    x_ptr, seed_ptr, height, width, stride, strips, row_stream, column_stream, draw_i, draw_j, draw_width,
    row_amax, row_codes, row_scales, row_operand,
    column_amax, column_codes, column_scales, column_operand,
    BF16_BITS: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
    ROW_VECTOR: tl.constexpr, COLUMN_VECTOR: tl.constexpr, BY_EIGHTS: tl.constexpr, ONE_DRAW: tl.constexpr,
    ROWS: tl.constexpr, ROW_RULE: tl.constexpr, ROW_BR: tl.constexpr, ROW_BC: tl.constexpr,
    ROW_ROUNDING: tl.constexpr, ROW_N: tl.constexpr, ROW_MASK: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMN_RULE: tl.constexpr, COLUMN_BR: tl.constexpr, COLUMN_BC: tl.constexpr,
    COLUMN_ROUNDING: tl.constexpr, COLUMN_N: tl.constexpr, COLUMN_MASK: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    CONVERT: tl.constexpr = 0, XORSIGN: tl.constexpr = False, FAR: tl.constexpr = False, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Blocks are given as BR rows by BC columns of x, for the column form too. An output that is None is not made.

    Draws count the element (i + draw_i, j + draw_j) of a tensor draw_width wide, of which x may be a part.
    CONVERT: which conversion instructions there are (codecs_sm100.py); XORSIGN: see packed.larger_magnitude;
    FAR: within a tile, offsets need more than 32 bits. AHEAD: the next tile is asked for while this one is worked on.
    Each program goes up a column of tiles, every ``strips``-th from the end: the amax pass went from the beginning,
    and the cache still holds what it read last.
    """
    if FAR:
        stride = stride.to(tl.int64)
        width = width.to(tl.int64)
    tiles_i = tl.cdiv(height, BI)
    tiles_j = tl.cdiv(width, BJ)
    j0 = (tl.program_id(0) % tiles_j) * BJ
    first = tl.program_id(0) // tiles_j
    row_a = 1.0
    row_b = 1.0
    row_lift = 1.0
    column_a = 1.0
    column_b = 1.0
    column_lift = 1.0
    ordinary = True
    if ROWS and ROW_RULE == "nvfp4":
        row_a, row_b, row_lift = scales.nvfp4_global(tl.load(row_amax))
        ordinary = scales.is_ordinary(row_b, row_lift)
    if COLUMNS and COLUMN_RULE == "nvfp4":
        column_a, column_b, column_lift = scales.nvfp4_global(tl.load(column_amax))
        ordinary = ordinary & scales.is_ordinary(column_b, column_lift)
    # Tensors of tiny amax need a few more steps. They are next to never met, so the others do not pay for them.
    if ordinary:
        for strip in range(first, tiles_i, strips):
            i0 = (tiles_i - 1 - strip).to(tl.int64) * BI
            if AHEAD:
                _fetch_ahead(
                    x_ptr, stride, tl.maximum(i0 - strips.to(tl.int64) * BI, 0), j0, height, width, BI, BJ,
                    64 if BF16_BITS else 32,
                )  # fmt: skip
            _tile(
                i0, j0, x_ptr, seed_ptr, height, width, stride, row_stream, column_stream, draw_i, draw_j, draw_width,
                row_a, row_b, row_lift, row_codes, row_scales, row_operand,
                column_a, column_b, column_lift, column_codes, column_scales, column_operand,
                BF16_BITS, EVEN, BI, BJ, ROW_VECTOR, COLUMN_VECTOR, BY_EIGHTS, ONE_DRAW,
                ROWS, ROW_RULE, ROW_BR, ROW_BC, ROW_ROUNDING, ROW_N, ROW_MASK, ROW_FACTOR,
                COLUMNS, COLUMN_RULE, COLUMN_BR, COLUMN_BC, COLUMN_ROUNDING, COLUMN_N, COLUMN_MASK, COLUMN_FACTOR,
                CONVERT, XORSIGN, AHEAD, True,
            )  # fmt: skip
    else:
        for strip in range(first, tiles_i, strips):
            i0 = (tiles_i - 1 - strip).to(tl.int64) * BI
            _tile(
                i0, j0, x_ptr, seed_ptr, height, width, stride, row_stream, column_stream, draw_i, draw_j, draw_width,
                row_a, row_b, row_lift, row_codes, row_scales, row_operand,
                column_a, column_b, column_lift, column_codes, column_scales, column_operand,
                BF16_BITS, EVEN, BI, BJ, ROW_VECTOR, COLUMN_VECTOR, BY_EIGHTS, ONE_DRAW,
                ROWS, ROW_RULE, ROW_BR, ROW_BC, ROW_ROUNDING, ROW_N, ROW_MASK, ROW_FACTOR,
                COLUMNS, COLUMN_RULE, COLUMN_BR, COLUMN_BC, COLUMN_ROUNDING, COLUMN_N, COLUMN_MASK, COLUMN_FACTOR,
                CONVERT, XORSIGN, AHEAD, False,
            )  # fmt: skip
