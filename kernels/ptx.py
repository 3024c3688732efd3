"""What a kernel's PTX says about its matrix instructions: kind, scales, where operands come from, how fast it can be.

On sm_100 four kinds of ``tcgen05.mma`` take FP4 data and give the same numbers; ``mxf4`` and ``mxf4nvf4`` run at twice
the speed of ``f8f6f4`` and ``mxf8f6f4``. On sm_120 the same kinds belong to ``mma.sync``.

Sources: PTX ISA, "tcgen05.mma" (kinds, block scaling, instruction descriptor) and "mma with block scaling"; speeds:
CUTLASS, "Blackwell SM100 GEMMs".
"""

import re
from dataclasses import dataclass

# wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16, mma.sync.aligned.m16n8k16..., tcgen05.mma.cta_group::1.kind::
_MMA = re.compile(r"(?<![\w.])((?:wgmma\.mma_async|mma\.sync|mma\.sp|tcgen05\.mma)(?:\.[\w:]+)*)([^;]*);")
_ADDRESS = re.compile(r"\[\s*(%\w+)(?:\s*\+\s*(\d+))?\s*\]")
_BLOCKS = {"block16": 16, "scale_vec::4X": 16, "block32": 32, "scale_vec::2X": 32, "scale_vec::1X": 32}
# The dense rate of a kind of tcgen05.mma over that of Hopper's FP8 instruction
_SPEED = {"mxf4nvf4": "4x", "mxf4": "4x", "mxf8f6f4": "2x", "f8f6f4": "2x", "i8": "2x", "f16": "1x", "tf32": "1/2x"}
UNKNOWN = "?"


@dataclass(frozen=True)
class Mma:
    """One kind of matrix instruction in a kernel. Fields that its family has not are empty."""

    instruction: str  # the mnemonic with all its qualifiers
    kind: str  # mxf4nvf4 | mxf4 | mxf8f6f4 | f8f6f4 | f16 | ..., or the types of an instruction without kinds
    block: int  # elements that share a scale: 16 | 32 | 0
    scale_type: str  # ue4m3 | ue8m0
    a_source: str  # shared | tensor memory | registers
    scales_by: str  # tcgen05.cp | tcgen05.st | registers
    cta_group: int  # CTAs that share one instruction: 1 | 2 | 0 before tcgen05
    layout: str  # TN: both operands packed along K; NN, NT, TT, or ? where the PTX does not say
    accumulator_columns: int  # of tensor memory
    scale_columns: int

    @property
    def family(self) -> str:
        return ".".join(self.instruction.split(".")[:2])

    @property
    def speed(self) -> str:
        """Dense rate over that of Hopper's FP8 instruction, by the kind; empty outside tcgen05 and FP4."""
        if self.family == "tcgen05.mma":
            return _SPEED.get(self.kind, UNKNOWN)
        return "fast FP4" if self.kind in ("mxf4", "mxf4nvf4") else ""


def mma_instructions(ptx: str) -> list[str]:
    """The distinct matrix instructions of a PTX text, in order of appearance, with all their qualifiers."""
    return list(dict.fromkeys(name for name, _ in _statements(ptx)))


def conversions(ptx: str) -> list[str]:
    """The distinct conversions to E2M1, in order of appearance."""
    return list(dict.fromkeys(re.findall(r"cvt\.r[ns][\w.]*e2m1x[24]\.f32", _code(ptx))))


def matrix_instructions(ptx: str) -> list[Mma]:
    """One Mma for each distinct instruction of the text (by name, source and scales), in order of appearance."""
    code = _code(ptx)
    found: dict[tuple, list] = {}
    for name, operands in _statements(ptx):
        read = _tcgen05(name, operands, code) if name.startswith("tcgen05") else _other(name, operands)
        key = (name, *read[:-1])
        found.setdefault(key, []).append(read[-1])
    results = []
    for (name, kind, block, scale_type, a_source, scales_by, group, layout), uses in found.items():
        accumulators = {use[0]: use[1] for use in uses if use}
        scales = {address: columns for use in uses if use for address, columns in use[2]}
        columns = sum(accumulators.values()), sum(scales.values())
        results.append(Mma(name, kind, block, scale_type, a_source, scales_by, group, layout, *columns))
    return results


def _code(ptx: str) -> str:
    return re.sub(r"//[^\n]*", "", ptx)


def _statements(ptx: str) -> list[tuple[str, str]]:
    return _MMA.findall(_code(ptx))


def _word(name: str, table: dict) -> str:
    return next((word for word in name.split(".") if word in table), "")


def _kind(name: str) -> str:
    match = re.search(r"kind::(\w+)", name)
    return match[1] if match else ""


def _other(name: str, operands: str) -> tuple:
    """wgmma and mma.sync: types and layouts stand in the name, or in the last immediates."""
    words = name.split(".")
    scale_type = words[-1] if words[-1] in ("ue4m3", "ue8m0") else ""
    block = _BLOCKS.get(_word(name, _BLOCKS), 0)
    if name.startswith("wgmma"):
        rest = re.sub(r"\{[^}]*\}", "{}", operands)  # d, a, b, p, scale-a, scale-b[, transpose-a], transpose-b
        parts = [part.strip() for part in rest.split(",")]
        from_registers = len(parts) > 1 and parts[1] == "{}"
        flags = parts[6:]
        transposed = ["0", *flags] if from_registers else flags
        layout = _layout(*(flag == "1" for flag in transposed)) if len(transposed) == 2 else UNKNOWN
        kind, source = ".".join(words[-2:]), "registers" if from_registers else "shared"
    else:
        kind, source = _kind(name) or ".".join(words[-3:-1]), "registers"
        layout = "TN" if ".row.col" in name else UNKNOWN
    return kind, block, scale_type, source, "registers" if scale_type else "", 0, layout, None


def _layout(a_transposed: bool, b_transposed: bool) -> str:
    """In BLAS letters, columns first: TN is what both operands packed along K are called."""
    return ("N" if a_transposed else "T") + ("T" if b_transposed else "N")


def _tcgen05(name: str, operands: str, code: str) -> tuple:
    """The last item: (accumulator, its columns, [(scale address, columns)])."""
    kind, block = _kind(name), _BLOCKS.get(_word(name, _BLOCKS), 0)
    group = re.search(r"cta_group::(\d)", name)
    parts = [part.strip() for part in operands.split(",")]
    a_source = "tensor memory" if parts[1].startswith("[") else "shared"
    descriptor = _constant(parts[3], code)
    scales = [_address(part) for part in parts[4:] if part.startswith("[")]
    scale_type, layout, columns, uses = "", UNKNOWN, 0, []
    if descriptor is not None:  # bits of the instruction descriptor: 15, 16 transpose; 17-22 N / 8; 23 scale type
        layout = _layout(bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1))
        columns = (descriptor >> 17 & 63) * 8
    if kind in ("mxf4", "mxf8f6f4"):
        scale_type = "ue8m0"
    elif kind == "mxf4nvf4":
        scale_type = UNKNOWN if descriptor is None else ("ue4m3", "ue8m0")[descriptor >> 23 & 1]
    if scales:  # 128 lanes hold the four scales of a row in one column of 32 lanes: 128 rows of A take 4, N of B N / 32
        uses = list(zip(scales, (4, columns // 32), strict=False))
    return (
        kind, block, scale_type, a_source, _arrival(scales, code) if scales else "", int(group[1]) if group else 0,
        layout, (_address(parts[0]), columns, uses),
    )  # fmt: skip


def _address(operand: str) -> tuple[str, str]:
    match = _ADDRESS.match(operand)
    return (match[1], match[2] or "0") if match else (operand, "0")


def _constant(register: str, code: str) -> int | None:
    """The one value that is moved to ``register``, as 32 bits; None where it is computed."""
    values = set(re.findall(rf"mov\.[bu]32\s+{re.escape(register)}, (-?\d+);", code))
    return int(values.pop()) & 0xFFFFFFFF if len(values) == 1 else None


def _arrival(scales: list[tuple[str, str]], code: str) -> str:
    """``tcgen05.cp`` if each of these addresses is the destination of one, else ``tcgen05.st``."""
    copied = {_address(operand) for operand in re.findall(r"tcgen05\.cp[\w.:]*\s+(\[[^\]]*\])", code)}
    return "tcgen05.cp" if all(address in copied for address in scales) else "tcgen05.st"
