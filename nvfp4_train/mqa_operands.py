"""Operands of MQA logits: how queries and keys are quantized, and the layouts in which they may come.

Three ways in, one form inside:

- ``mqa_operand(x)`` quantizes a plain tensor and remembers it, so that gradients pass straight through to it;
- a ``QuantizedTensor`` whose rows are the heads of the queries one after the other (row m * H + h), or the keys;
- DeepGEMM's layout: ``(int8 codes [..., D/2], int32 [...])``, the int32 holding the UE8M0 bytes of the row's blocks of
  32, the first block's in the lowest byte. (Where D is 64 the upper two bytes are not read.)

A paged cache holds, page by page, first the codes of all its keys and then their scale bytes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.ledger import UNNAMED
from nvfp4_train.quantization import BF16, INPUT_TYPES, QuantizedTensor, quantize
from nvfp4_train.recipe import OperandSpec

HEAD_DIMS = (64, 128)
MOST_HEADS = 64
TIES = ("even", "toward_zero")
DEEPSEEK = OperandSpec(format="mxfp4", block="1x32", rounding="nearest", scale_rule="ceil")
DEEPGEMM_SCHEME = str(DEEPSEEK.scheme)
SCALE_BYTES = 4  # of a key in DeepGEMM's layout, at any head size


class MQAOperand(NamedTuple):
    """Quantized queries ``[..., H, D]`` or keys ``[..., D]``: what ``shape`` says, one row for each vector of D."""

    quantized: QuantizedTensor  # [product of the others, D]
    shape: tuple[int, ...]
    source: Tensor | None = None  # what was quantized, of this shape; gradients go there

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values the score is made of, ``dtype`` of this shape."""
        return self.quantized.dequantize(dtype).view(self.shape)

    def deepgemm(self) -> tuple[Tensor, Tensor]:
        """``(int8 [..., D/2], int32 [...])``, DeepGEMM's layout. ValueError unless this is MXFP4."""
        scheme = self.quantized.scheme
        if scheme is None or scheme.scale != "e8m0":
            raise ValueError(f"DeepGEMM's layout holds MXFP4, not an operand {self.quantized.scheme_text}")
        codes, scales = self.quantized.codes.contiguous(), self.quantized.scale_bytes
        padded = scales.new_zeros(len(scales), SCALE_BYTES)
        padded[:, : scales.shape[1]] = scales
        lead = self.shape[:-1]
        return codes.view(torch.int8).view(*lead, codes.shape[1]), padded.view(torch.int32).view(lead)


def mqa_operand(x: Tensor, spec: OperandSpec = DEEPSEEK, *, ties: str = "even", where: int = UNNAMED) -> MQAOperand:
    """Quantizes queries ``[M, H, D]`` (``[B, T, H, D]`` for paged logits) or keys ``[N, D]`` along D.

    Args:
        x: float32, bfloat16 or float16; if it requires a gradient, the logits' backward gives it one.
        spec: MXFP4 with DeepSeek's scale rule by default; any 1-D block of 4-bit elements without a Hadamard
            transform (rotate x before, as ``LightningIndexer`` does), or ``bf16`` for a control.
        ties: of values midway between two codes: to the ``even`` code, as the hardware rounds, or ``toward_zero``,
            as DeepGEMM's Python helper does (MXFP4 with rule ``ceil`` only).

    Raises:
        ValueError: a head size other than 64 or 128, a dtype, a spec or ties that cannot be.
    """
    if x.dim() < 2 or x.shape[-1] not in HEAD_DIMS or x.dtype not in INPUT_TYPES:
        raise ValueError(
            "queries [M, H, D] or keys [N, D] of float32, bfloat16 or float16 with D 64 or 128 are quantized, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if ties not in TIES:
        raise ValueError(f"ties must be one of {', '.join(TIES)}, not {ties!r}")
    if spec.hadamard or (spec.block or "1x").split("x")[0] != "1":
        raise ValueError(
            f"MQA operands have 1-D blocks and no Hadamard transform of their own, got block {spec.block}, "
            f"hadamard {spec.hadamard}"
        )
    rows = x.detach().reshape(-1, x.shape[-1])
    if ties == "even":
        quantized = quantize(rows, spec, name="mqa", where=where)
    elif spec != DEEPSEEK:
        raise ValueError(f"ties toward_zero go with {DEEPSEEK.text} only, not with {spec.text}")
    else:
        codes, scales = _toward_zero_op(rows, where)
        quantized = QuantizedTensor(DEEPGEMM_SCHEME, *rows.shape, None, codes, scales)
    return MQAOperand(quantized, tuple(x.shape), x if x.requires_grad else None)


def as_operand(value, name: str) -> MQAOperand:
    """Whatever a caller may hand in, as an MQAOperand. ValueError names ``name`` and what came."""
    if isinstance(value, MQAOperand):
        operand = value
    elif isinstance(value, QuantizedTensor):
        operand = MQAOperand(value, tuple(value.shape))
    elif isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, Tensor) for part in value):
        operand = _from_deepgemm(*value, name)
    else:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must be quantized: mqa_operand(x), a QuantizedTensor, or DeepGEMM's (int8 codes, int32 scales); "
            f"got {got}"
        )
    scheme = operand.quantized.scheme
    if scheme is not None and (scheme.block[0] != 1 or operand.quantized.codes is None):
        raise ValueError(f"{name} must hold codes in 1-D blocks, got scheme {operand.quantized.scheme_text}")
    if operand.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"{name} must have a head size D of 64 or 128, got shape {operand.shape}")
    return operand


def check_pair(q: MQAOperand, k_scheme: str, name: str) -> None:
    """ValueError unless both are of one format: one matrix instruction reads both."""
    ours = [text if text == BF16 else _coding(Scheme.parse(text)) for text in (q.quantized.scheme_text, k_scheme)]
    if ours[0] != ours[1]:
        raise ValueError(f"q and {name} must be of one format, got {q.quantized.scheme_text} and {k_scheme}")


def parts(x: QuantizedTensor) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """(codes or the BF16 operand, scale bytes, amax, scheme text): how an operand travels into a custom op."""
    if x.scheme_text == BF16:
        return x.operand, None, None, BF16
    return x.codes, x.scale_bytes, x.global_amax, x.scheme_text


def kernel_operand(first: Tensor, scales: Tensor | None, amax: Tensor | None) -> Quantized:
    """The inverse: what the kernels take."""
    return Quantized(None, None, first) if scales is None else Quantized(first, scales, None, amax)


def paged_cache(kv: MQAOperand | QuantizedTensor | tuple[Tensor, Tensor], page: int) -> Tensor:
    """uint8 ``[pages, page, 1, D/2 + S]``: keys ``[N, D]`` in order, the last page filled up with zeros.

    S: 4 bytes of scales a key for MXFP4 (as DeepGEMM has it), D/16 for NVFP4, whose amax stays with the caller.
    """
    operand = as_operand(kv, "kv")
    if operand.quantized.scheme is None:
        raise ValueError("a paged cache holds 4-bit keys, not bf16")
    codes, scales = operand.quantized.codes, operand.quantized.scale_bytes
    size = scale_bytes_of(operand.quantized.scheme, operand.shape[-1])
    pages = math.ceil(len(codes) / page)
    values = codes.new_zeros(pages * page, codes.shape[1])
    values[: len(codes)] = codes
    beside = codes.new_zeros(pages * page, size)
    beside[: len(codes), : scales.shape[1]] = scales
    together = torch.cat([values.view(pages, page * codes.shape[1]), beside.view(pages, page * size)], dim=1)
    return together.view(pages, page, 1, codes.shape[1] + size)


def scale_bytes_of(scheme: Scheme, head_dim: int) -> int:
    """Bytes of scales that a cached key has."""
    return SCALE_BYTES if scheme.scale == "e8m0" else head_dim // scheme.block[1]


@torch.library.custom_op("nvfp4_train::quantize_toward_zero", mutates_args=())
def _toward_zero_op(x: Tensor, where: int) -> tuple[Tensor, Tensor]:
    ledger.count_quantization(where, "mqa", DEEPGEMM_SCHEME, "reference", x.numel())
    return reference.quantize_toward_zero(x)[:2]


@_toward_zero_op.register_fake
def _(x, where):
    rows, columns = x.shape
    return x.new_empty(rows, columns // 2, dtype=torch.uint8), x.new_empty(rows, columns // 32, dtype=torch.uint8)


def _coding(scheme: Scheme) -> tuple:
    return scheme.element, scheme.scale, scheme.block, scheme.hadamard, scheme.hadamard and scheme.sign_mask


def _from_deepgemm(codes: Tensor, scales: Tensor, name: str) -> MQAOperand:
    lead, head_dim = tuple(codes.shape[:-1]), 2 * codes.shape[-1]
    if codes.dtype not in (torch.int8, torch.uint8) or scales.dtype != torch.int32:
        raise ValueError(
            f"{name} in DeepGEMM's layout is (int8 codes, int32 scales), got {codes.dtype} and {scales.dtype}"
        )
    if tuple(scales.shape) not in (lead, (*lead, 1)) or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"{name} in DeepGEMM's layout is codes [..., D/2], D 64 or 128, and one int32 for each row of them, "
            f"got {tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    scale_bytes = scales.contiguous().view(torch.uint8).view(-1, SCALE_BYTES)[:, : head_dim // 32]
    packed = codes.contiguous().view(torch.uint8).view(-1, head_dim // 2)
    quantized = QuantizedTensor(DEEPGEMM_SCHEME, len(packed), head_dim, None, packed, scale_bytes.contiguous())
    return MQAOperand(quantized, (*lead, head_dim))
