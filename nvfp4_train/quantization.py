"""quantize: a tensor becomes a QuantizedTensor.

The work happens in one operator (quantize_ops.py, the only place that chooses between reference and Triton kernels),
which makes the row form (of ``x``), the column form (of ``x.T``) or both from one read of ``x``; a layer needs its
input and its gradient in both forms.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.quantized import amax_place
from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.backend import choose
from nvfp4_train.quantize_ops import able, amaxes_op, decode_op, draw_seed_op, layout_of, quantize_op
from nvfp4_train.recipe import OperandSpec
from nvfp4_train.sharding import Part, shared_maximum, shared_seed

BF16 = "bf16"  # the scheme text of an operand that is not quantized
# Second word of the Philox key. Both forms of one tensor draw from one stream.
STREAM = {"input": 0, "weight": 1, "grad_output": 2}
INPUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedTensor(NamedTuple):
    """One operand ``[rows, K]`` of a GEMM.

    ``operand`` is the decoded matrix without the global scale: exact in BF16, or in float32 for schemes that would not
    be (``Scheme.exact_in_bf16``). ``codes`` and ``scale_bytes`` are the packed form; at least one of the two is there.
    ``transposed``: what is stored is the transpose of this operand (square blocks only, where both directions share
    their scales). A BF16 operand has only ``operand``.
    """

    scheme_text: str
    rows: int
    columns: int
    global_amax: Tensor | None = None  # float32 scalar; None for formats with one level of scales
    codes: Tensor | None = None  # uint8 [rows, K // 2], two 4-bit codes a byte, even index first; [rows, K] if wider
    scale_bytes: Tensor | None = None  # uint8 (or float32 scales) [rows, K // block], or [rows / 16, K / 16]
    operand: Tensor | None = None  # bfloat16 or float32 [rows, K]
    transposed: bool = False
    quantize_backend: str = "reference"
    outer_amax: Tensor | None = None  # float32 [rows, K // outer block]; None without outer blocks
    mask: Tensor | None = None  # uint8 [rows, K // 8], a bit for each element that did not saturate; None unless asked

    @property
    def scheme(self) -> Scheme | None:
        return None if self.scheme_text == BF16 else Scheme.parse(self.scheme_text)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.columns)

    @property
    def block_scales(self) -> Tensor:
        """The block scales: float8_e4m3fn, float32, or uint8 E8M0 exponent bytes (``float8_e8m0fnu``) for MX
        formats."""
        self._require_codes()
        return self.scale_bytes.view(torch.float8_e4m3fn) if self.scheme.scale == "e4m3" else self.scale_bytes

    @property
    def T(self) -> "QuantizedTensor":
        """The same codes and scales read the other way: exact, for square blocks and BF16 only.

        Raises ValueError for 1-D blocks: their transpose must be quantized anew.
        """
        if self.scheme_text == BF16:
            return self._replace(rows=self.columns, columns=self.rows, operand=self.operand.T)
        rows, columns = self.scheme.block
        if rows != columns:
            raise ValueError(f"the transpose of {rows}x{columns} blocks must be quantized anew, from the source tensor")
        operand = None if self.operand is None else self.operand.T
        return self._replace(rows=self.columns, columns=self.rows, operand=operand, transposed=not self.transposed)

    def decode(self) -> Tensor:
        """``[rows, K]``: code x block scale, without the global scale. bfloat16 and exact, or float32 (see above)."""
        if self.operand is not None:
            return self.operand
        rows, columns = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        decoded = decode_op(
            self.codes, self.scale_bytes, self.outer_amax, self.scheme_text, columns, self.quantize_backend
        )
        assert decoded.shape[0] == rows
        return decoded.T if self.transposed else decoded

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[rows, K]`` in ``dtype``, global scale included, computed in float32 in the reference's order."""
        if self.scheme_text == BF16:
            return self.operand.to(dtype)
        self._require_codes()
        columns = self.rows if self.transposed else self.columns
        values = reference.dequantize(
            self.codes, self.scale_bytes, self.global_amax, self.scheme, columns, dtype, self.outer_amax
        )
        return values.T if self.transposed else values

    def packed_only(self) -> "QuantizedTensor":
        """Without the decoded copy: what a layer keeps for backward (BF16 operands have nothing else to keep)."""
        return self if self.codes is None else self._replace(operand=None)

    def _require_codes(self) -> None:
        if self.codes is None:
            raise ValueError(f"this tensor holds no codes (scheme {self.scheme_text}, decoded form only)")


def quantize(
    x: Tensor,
    spec: OperandSpec | str,
    *,
    transpose: bool = False,
    seed: Tensor | None = None,
    stream: int = 0,
    form: str = "packed",
    backend: str | None = None,
    where: int = ledger.UNNAMED,
    name: str = "tensor",
    part: Part | None = None,
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantizes ``x [rows, K]`` (or ``x.T`` with ``transpose``) as ``spec`` says.

    Args:
        x: float32, bfloat16 or float16, two-dimensional, any strides.
        spec: an OperandSpec, or the text of a Scheme, or ``"bf16"``.
        seed: int64 scalar on x's device, the Philox key, needed for stochastic rounding (drawn from torch's own
            generator when missing).
        stream: the second word of the Philox key. Draws are counted by the element of ``x`` as handed in.
        form: ``packed`` (codes and scales), ``decoded`` (BF16 operand) or ``both``.
        backend: ``reference`` or ``triton``; None chooses by device.
        part: what ``x`` is a part of; its codes are then those of the whole. A collective over the part's group.
        amax: float32 scalar, the global amax where it is known already.

    Raises:
        ValueError: wrong rank, dtype or device, or a backend that cannot run here.
    """
    scheme = _scheme_text(spec)
    rows, columns = (None, scheme) if transpose else (scheme, None)
    pair = quantize_both(
        x, rows, columns, seed=seed, stream=stream, rows_form=form, columns_form=form, backend=backend,
        where=where, rows_name=name, columns_name=name, part=part, amax=amax,
    )  # fmt: skip
    return pair[1 if transpose else 0]


def quantize_both(
    x: Tensor,
    rows: str | None,
    columns: str | None,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    rows_form: str = "packed",
    columns_form: str = "packed",
    backend: str | None = None,
    where: int = ledger.UNNAMED,
    rows_name: str = "rows",
    columns_name: str = "columns",
    part: Part | None = None,
    amax: Tensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The row form (``x``) and the column form (``x.T``) from one read of ``x``; None skips one of them.

    Both forms of an element share its random draw: each is unbiased by itself, and one Philox call serves both.
    """
    _check_input(x)
    backend = backend or choose(x.device, "emulated").quantize
    quantized_rows = None if rows == BF16 else rows
    quantized_columns = None if columns == BF16 else columns
    tensors: list[Tensor] = []
    amaxes = None
    if quantized_rows or quantized_columns:
        if seed is None and needs_seed(quantized_rows, quantized_columns):
            seed = draw_seed(x, where)
            seed = seed if part is None else shared_seed(seed, part.group)
        if seed is None and torch.compiler.is_compiling():
            # calls that are equal become one: siblings such as q, k, v quantize their input once
            where = ledger.UNNAMED
        amaxes = _amaxes(x, quantized_rows, quantized_columns, amax, part, seed, backend)
        tensors = quantize_op(
            x, quantized_rows, quantized_columns, amaxes, seed, stream, rows_form, columns_form, backend, where,
            rows_name, columns_name, None if part is None else part.origin,
        )  # fmt: skip
    parts = iter(tensors)
    return (
        _collect(x, rows, rows_form, amaxes, parts, backend, transpose=False),
        _collect(x, columns, columns_form, amaxes, parts, backend, transpose=True),
    )


def _amaxes(
    x: Tensor, rows: str | None, columns: str | None, amax: Tensor | None, part: Part | None, seed: Tensor | None,
    backend: str,
) -> Tensor | None:  # fmt: skip
    """float32 [3]: the amax of ``x``, or of the whole it is a part of, plain and rotated (``amax_place`` says where).

    None where neither form has a global scale.
    """
    if not any(text is not None and Scheme.parse(text).has_global_scale for text in (rows, columns)):
        return None
    if amax is not None:
        return amax.reshape(1).expand(3)
    amaxes = amaxes_op(x, rows, columns, seed, backend)
    return amaxes if part is None else shared_maximum(amaxes.view(torch.int32), part.group)


def draw_seed(x: Tensor, where: int) -> Tensor:
    """The randomness of one module call: int64 scalar on x's device, from torch's own generator, no host sync."""
    return draw_seed_op(x, where)


def _scheme_text(spec: OperandSpec | str) -> str:
    if isinstance(spec, str):
        return spec
    for key in ("split", "requantize", "history"):
        if getattr(spec, key):
            raise ValueError(f"{key} acts in a layer (QuantizedLinear), not on a tensor by itself: leave it out")
    return BF16 if spec.scheme is None else str(spec.scheme)


def layer_input(x: Tensor, label: str) -> Tensor:
    """``x`` as a linear layer sees it: in autocast's dtype where autocast is on for its device.

    ValueError, naming the layer ``label``, for input that cannot be quantized.
    """
    if x.dtype not in INPUT_TYPES:
        raise ValueError(f"{label}: input must be float32, bfloat16 or float16, got {x.dtype}")
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def needs_seed(*schemes: str | None) -> bool:
    """Whether quantizing so draws random numbers, for elements, scales or signs."""
    return any(scheme not in (None, BF16) and Scheme.parse(scheme).random for scheme in schemes)


def _check_input(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix [rows, K], got a tensor of shape {tuple(x.shape)}")
    if x.dtype not in INPUT_TYPES:
        raise ValueError(f"quantize takes float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}")


def _collect(x, scheme, form, amaxes, parts, backend, transpose) -> QuantizedTensor | None:
    if scheme is None:
        return None
    rows, columns = (x.shape[1], x.shape[0]) if transpose else (x.shape[0], x.shape[1])
    if scheme == BF16:
        operand = x.to(torch.bfloat16)
        return QuantizedTensor(BF16, rows, columns, operand=operand.T if transpose else operand)
    parsed = Scheme.parse(scheme)
    amax = amaxes[amax_place(parsed, transpose)] if parsed.has_global_scale else None
    # the op returns the column form in x's own layout, which costs no transposition
    view = (lambda t: t.T) if transpose else (lambda t: t)
    codes = scales = operand = None
    if form != "decoded":
        codes, scales = view(next(parts)), view(next(parts))
    if form != "packed":
        operand = view(next(parts))
    outer = view(next(parts)) if parsed.outer is not None else None
    mask = view(next(parts)) if parsed.masked else None
    columns = layout_of(rows, columns, parsed).operand[1]
    backend = able(backend, parsed)
    return QuantizedTensor(scheme, rows, columns, amax, codes, scales, operand, False, backend, outer, mask)
