"""The general quantize kernel: any scheme, one form at a time; the bits of ``reference/quantize.py``.

The fused kernel of quantize_kernel.py does NVFP4 and MXFP4 with the choices of the standard recipes at the speed of
memory; this one does everything else: other elements, scales and rules, large or drawn rotations, outer scales, four
over six, MS-EDEN. An operand [R, C] is read through its strides, so that the column form is the same code.
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs, general_elements, general_scales
from nvfp4_kernels.triton.hadamard import _stage
from nvfp4_kernels.triton.philox import inverted_draws, philox4x32_7

SIGN_STREAM = tl.constexpr(0x48414441)  # second word of the Philox key of signs that are drawn


@triton.jit
def load(
    x_ptr, r0, c0, rows, columns, stride_r, stride_c, TR: tl.constexpr, TC: tl.constexpr, BF16_BITS: tl.constexpr
):  # fmt: skip
    """The tile at (r0 int64, c0 int64) as float32, zeros outside."""
    r = r0 + tl.arange(0, TR)
    c = c0 + tl.arange(0, TC)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    raw = tl.load(x_ptr + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0)
    return codecs.to_float32(raw, BF16_BITS)


@triton.jit
def rotate(
    x, seed_ptr, N: tl.constexpr, STEP: tl.constexpr,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, M3: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Every N neighbours of a row transformed and rounded to bfloat16; signs of a 128-bit mask or of the seed."""
    TR: tl.constexpr = x.shape[0]
    TC: tl.constexpr = x.shape[1]
    index = tl.arange(0, TC) & (N - 1)
    if STEP:
        key = tl.load(seed_ptr).to(tl.uint32)
        w0, w1, w2, w3 = philox4x32_7(key * 0, key * 0, key, key * 0 + SIGN_STREAM)
    else:
        w0 = tl.full((), M0, tl.uint32)
        w1 = tl.full((), M1, tl.uint32)
        w2 = tl.full((), M2, tl.uint32)
        w3 = tl.full((), M3, tl.uint32)
    word = tl.where(index < 64, tl.where(index < 32, w0, w1), tl.where(index < 96, w2, w3))
    negative = (word >> (index & 31).to(tl.uint32)) & 1
    x = x * tl.where(negative == 1, -1.0, 1.0)[None, :]
    LOG_N: tl.constexpr = N.bit_length() - 1
    for stage in tl.static_range(LOG_N):
        x = _stage(x, 2**stage)
    return codecs.round_to_bfloat16(tl.reshape(x, (TR, TC)) * FACTOR)


@triton.jit
def general_amax_kernel(
    x_ptr, seed_ptr, out_ptr, rows, columns, stride_r, stride_c,
    BF16_BITS: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, M3: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The largest magnitude after the rotation joins the int32 bits at ``out_ptr``; NaN or Inf gives NaN."""
    tiles_c = tl.cdiv(columns, TC)
    r0 = (tl.program_id(0) // tiles_c).to(tl.int64) * TR
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * TC
    x = load(x_ptr, r0, c0, rows, columns, stride_r, stride_c, TR, TC, BF16_BITS)
    x = rotate(x, seed_ptr, N, STEP, M0, M1, M2, M3, FACTOR)
    bits = codecs.bits_of(codecs.largest_magnitude(codecs.largest_magnitude(x, 1), 0))
    tl.atomic_max(out_ptr, tl.where(bits >= codecs.INFINITY_BITS, codecs.NAN_BITS, bits), sem="relaxed")


@triton.jit
def _put(pointer, tile, r0, c0, rows, columns, stride_r, stride_c):
    """``tile`` at (r0, c0) of [rows, columns]."""
    r = r0 + tl.arange(0, tile.shape[0])
    c = c0 + tl.arange(0, tile.shape[1])
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(pointer + r[:, None] * stride_r + c[None, :] * stride_c, tile, mask=inside)


# a stream or an offset of 1 would otherwise arrive as a constant, which has no type
@triton.jit(do_not_specialize=["stream", "draw_i", "draw_j", "draw_width"])
def general_kernel(
    x_ptr, seed_ptr, amax_ptr, given_ptr, rows, columns, stride_r, stride_c, stream, draw_i, draw_j, draw_width,
    codes_ptr, codes_r, codes_c, scales_ptr, scales_r, scales_c, operand_ptr, operand_r, operand_c,
    outer_ptr, outer_r, outer_c, mask_ptr, mask_r, mask_c, padded, operand_columns,
    BF16_BITS: tl.constexpr, COLUMN_FORM: tl.constexpr, BY_EIGHTS: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, RULE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, TOP: tl.constexpr,
    RANGE: tl.constexpr, HEADROOM: tl.constexpr, TOP_EXPONENT: tl.constexpr, TOP_FRACTION: tl.constexpr,
    ROUNDING: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, M3: tl.constexpr, FACTOR: tl.constexpr,
    OUTER: tl.constexpr, SELECT: tl.constexpr, CLIP: tl.constexpr, TENSOR: tl.constexpr, FLOAT32_OUT: tl.constexpr,
):  # fmt: skip
    """One tile of one form; an output that is None is not made.

    Blocks of BR x BC. ``given_ptr``: the amax of each row, where a block is the whole row. ``OUTER``: columns of an
    outer block, or 0. ``TENSOR``: one float32 scale and no other. ``ROUNDING``: 0 nearest, 1 and 2 stochastic with 16
    and 8 bits, 3 of the scales. ``padded``: columns with padding.
    """
    tiles_c = tl.cdiv(padded, TC)
    r0 = (tl.program_id(0) // tiles_c).to(tl.int64) * TR
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * TC
    A: tl.constexpr = TR // BR
    B: tl.constexpr = TC // BC
    x = load(x_ptr, r0, c0, rows, columns, stride_r, stride_c, TR, TC, BF16_BITS)
    if N > 0:
        x = rotate(x, seed_ptr, N, STEP, M0, M1, M2, M3, FACTOR)
    x = tl.reshape(x, (A, BR, B, BC))

    if TENSOR:
        block_amax = tl.broadcast_to(tl.load(amax_ptr), (A, B))
    elif given_ptr is not None:
        r = r0 + tl.arange(0, TR)
        found = tl.load(given_ptr + r, mask=r < rows, other=0)
        block_amax = tl.reshape(tl.broadcast_to(found[:, None], (TR, B)), (A, B))
    else:
        block_amax = codecs.largest_magnitude(codecs.largest_magnitude(x, 3), 1)
    level = tl.zeros((A, B), tl.float32)
    if OUTER > 0:
        OUTERS: tl.constexpr = TC // OUTER
        found = codecs.largest_magnitude(tl.reshape(block_amax, (A, OUTERS, OUTER // BC)), 2)
        found = tl.where(codecs.bits_of(found) >= codecs.INFINITY_BITS, float("nan"), found)
        _put(outer_ptr, found, r0, c0 // OUTER, rows, padded // OUTER, outer_r, outer_c)
        level = tl.reshape(tl.broadcast_to(found[:, :, None], (A, OUTERS, OUTER // BC)), (A, B))
    elif RULE == "nvfp4":
        level = tl.broadcast_to(tl.load(amax_ptr), (A, B))
    if CLIP > 0:
        block_amax = tl.reshape(general_scales.spread(tl.reshape(x, (A * B, BC)), A * B, BC, CLIP), (A, B))

    lifted = level
    if RULE == "nvfp4":
        lift = general_scales.lift_of(level, TOP * RANGE / 3.4028234663852886e38)
        x = x * lift[:, None, :, None]
        block_amax = block_amax * lift
        lifted = level * lift
        s_enc = general_scales.encode_scale(lifted, TOP * RANGE)
        if SELECT != "":
            scale, encode = general_scales.four_over_six(x, block_amax, lifted, s_enc, SELECT, TOP, RANGE)
        else:
            scale, encode = general_scales.two_level(block_amax, s_enc, 1.0 / TOP)
    elif SCALE == "e8m0":
        scale, encode = general_scales.power_of_two(block_amax, RULE, TOP_EXPONENT, TOP_FRACTION, MANTISSA, HEADROOM)
    else:
        scale, encode = general_scales.one_level(block_amax, SCALE == "float32", TOP)

    beside = encode[:, None, :, None]
    scaled = general_elements.quotient(x, beside) if SCALE == "float32" else x * beside
    if mask_ptr is not None:
        kept = (tl.abs(scaled) <= LARGEST).to(tl.int32)
        kept = tl.reshape(kept, (TR, TC // 8, 8)) << tl.arange(0, 8)[None, None, :]
        _put(mask_ptr, tl.sum(kept, 2).to(tl.uint8), r0, c0 // 8, rows, padded // 8, mask_r, mask_c)
    up16 = tl.zeros((TR, TC), tl.int32)
    if ROUNDING > 0:
        seed = tl.load(seed_ptr)
        if COLUMN_FORM:
            drawn = inverted_draws(seed, stream, c0 + draw_i, r0 + draw_j, draw_width, TC, TR, BY_EIGHTS)
            up16 = tl.trans(drawn.to(tl.int32) & 0xFFFF)
        else:
            drawn = inverted_draws(seed, stream, r0 + draw_i, c0 + draw_j, draw_width, TR, TC, BY_EIGHTS)
            up16 = drawn.to(tl.int32) & 0xFFFF
    if ROUNDING == 1 or ROUNDING == 2:
        grid = general_elements.stochastic(
            scaled, tl.reshape(up16, (A, BR, B, BC)), ROUNDING == 2, INTEGER, MANTISSA, LEAST, LARGEST
        )
    else:
        grid = general_elements.nearest(scaled, INTEGER, MANTISSA, LEAST, LARGEST)
    if ROUNDING == 3:
        first = tl.where((tl.arange(0, BC) == 0)[None, None, :], tl.reshape(up16, (TR, B, BC)), 0)
        scale = general_scales.corrected(
            tl.reshape(scaled, (TR * B, BC)), tl.reshape(grid, (TR * B, BC)), scale, tl.sum(first, 2), BC, N // BC
        )

    if codes_ptr is not None:
        code = general_elements.code_of(grid, INTEGER, MANTISSA, LEAST, BITS)
        code = tl.reshape(tl.where((encode == encode)[:, None, :, None], code, 0), (TR, TC))
        if BITS == 4:
            low, high = tl.split(tl.reshape(code, (TR, TC // 2, 2)))
            _put(codes_ptr, (low | (high << 4)).to(tl.uint8), r0, c0 // 2, rows, padded // 2, codes_r, codes_c)
        else:
            _put(codes_ptr, code.to(tl.uint8), r0, c0, rows, padded, codes_r, codes_c)
    if scales_ptr is not None:
        if SCALE == "float32":
            stored = scale
        elif SCALE == "e4m3":
            stored = codecs.e4m3_byte(scale).to(tl.uint8)
        else:
            stored = codecs.e8m0_byte(scale).to(tl.uint8)
        if TENSOR:  # many programs write the same
            _put(scales_ptr, stored, r0 * 0, c0 * 0, 1, 1, scales_r, scales_c)
        elif given_ptr is not None:
            _put(scales_ptr, stored, r0, c0 * 0, rows, 1, scales_r, scales_c)
        else:
            _put(scales_ptr, stored, r0 // BR, c0 // BC, tl.cdiv(rows, BR), padded // BC, scales_r, scales_c)
    if operand_ptr is not None:
        if not TENSOR:
            grid = decoded(grid, scale, level, OUTER, TOP * RANGE)
        value = tl.reshape(grid, (TR, TC))
        if not FLOAT32_OUT:
            value = codecs.bfloat16_bits(codecs.round_to_bfloat16(value))
        _put(operand_ptr, value, r0, c0, rows, operand_columns, operand_r, operand_c)


@triton.jit
def decoded(grid, scale, level, OUTER: tl.constexpr, DIVISOR: tl.constexpr):
    """float32 [A, BR, B, BC]: grid times scale, which under outer scales is (scale * level) * (1 / DIVISOR)."""
    if OUTER > 0:
        lift = general_scales.lift_of(level, DIVISOR / 3.4028234663852886e38)
        lift = tl.where(level > 3.4028234663852886e38 / 448.0, 1.0 / codecs.LIFT, lift)
        scale = (scale * (level * lift)) * (1.0 / DIVISOR)
        return (grid * scale[:, None, :, None]) * general_elements.quotient(lift * 0.0 + 1.0, lift)[:, None, :, None]
    else:
        return grid * scale[:, None, :, None]


@triton.jit
def general_decode_kernel(
    codes_ptr, codes_r, codes_c, scales_ptr, scales_r, scales_c, outer_ptr, outer_r, outer_c,
    operand_ptr, operand_r, operand_c, rows, columns, padded,
    TR: tl.constexpr, TC: tl.constexpr, INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    BITS: tl.constexpr, SCALE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WHOLE_ROW: tl.constexpr,
    TENSOR: tl.constexpr, OUTER: tl.constexpr, DIVISOR: tl.constexpr, FLOAT32_OUT: tl.constexpr,
):  # fmt: skip
    """The operand [rows, columns] of codes and scales, without the global scale."""
    tiles_c = tl.cdiv(padded, TC)
    r0 = (tl.program_id(0) // tiles_c).to(tl.int64) * TR
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * TC
    A: tl.constexpr = TR // BR
    B: tl.constexpr = TC // BC
    r = r0 + tl.arange(0, TR)
    PER_BYTE: tl.constexpr = 2 if BITS == 4 else 1
    c = c0 // PER_BYTE + tl.arange(0, TC // PER_BYTE)
    inside = (r < rows)[:, None] & (c < padded // PER_BYTE)[None, :]
    code = tl.load(codes_ptr + r[:, None] * codes_r + c[None, :] * codes_c, mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        code = tl.reshape(tl.join(code & 15, code >> 4), (TR, TC))
    grid = tl.reshape(general_elements.value_of(code, INTEGER, MANTISSA, LEAST, BITS), (A, BR, B, BC))
    if not TENSOR:
        tile = r0 // BR + tl.arange(0, A)
        block = (tl.zeros((B,), tl.int64) if WHOLE_ROW else c0 // BC + tl.arange(0, B))
        inside = (tile < tl.cdiv(rows, BR))[:, None] & (block < tl.cdiv(padded, BC))[None, :]
        stored = tl.load(scales_ptr + tile[:, None] * scales_r + block[None, :] * scales_c, mask=inside, other=0)
        scale = stored if SCALE == "float32" else codecs.scale_value(stored.to(tl.int32), SCALE == "e4m3")
        level = scale
        if OUTER > 0:
            above = (c0 + tl.arange(0, B) * BC) // OUTER
            level = tl.load(
                outer_ptr + r[:, None] * outer_r + above[None, :] * outer_c,
                mask=(r < rows)[:, None] & (above < padded // OUTER)[None, :], other=0,
            )  # fmt: skip
        grid = decoded(grid, scale, level, OUTER, DIVISOR)
    value = tl.reshape(grid, (TR, TC))
    if not FLOAT32_OUT:
        value = codecs.bfloat16_bits(codecs.round_to_bfloat16(value))
    _put(operand_ptr, value, r0, c0, rows, columns, operand_r, operand_c)
