"""compile_for: a Triton kernel for any NVIDIA target, without a GPU; and which matrix instruction came out.

Tensor cores take the same operands through several instructions, some at half speed, and a compiler chooses without a
word. The PTX says which. Registers and spills are read from the machine code, shared memory from Triton's own record.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16, mma.sync.aligned.m16n8k16..., tcgen05.mma.cta_group::1.kind::
_MMA = re.compile(r"(?<![\w.])(wgmma\.mma_async|mma\.sync|mma\.sp|tcgen05\.mma)((?:\.[\w:]+)*)")


@dataclass(frozen=True)
class Report:
    """What one compiled kernel holds; ``instructions`` are the distinct MMA kinds in PTX order of appearance."""

    target: str
    instructions: tuple[str, ...]
    registers: int  # per thread
    spills: int  # bytes of stack a thread spills to; 0 is what a shipped configuration must have
    shared: int  # bytes per program
    tensor_memory: int  # columns of 512; 0 before sm_100

    @property
    def instruction(self) -> str:
        """The MMA, by its leading words: ``wgmma.mma_async``, ``mma.sync``, ``tcgen05.mma`` or empty."""
        return ".".join(self.instructions[0].split(".")[:2]) if self.instructions else ""


def compile_for(
    kernel, signature: dict, constexprs: dict, target: str = "sm_90", *,
    num_warps: int = 4, num_stages: int = 3, attrs: dict | None = None, **options,
):  # fmt: skip
    """Triton's compiled kernel (``.asm["ptx"]``, ``.asm["cubin"]``, ``.metadata``).

    Args:
        kernel: a ``@triton.jit`` function, decorated without ``TRITON_INTERPRET``.
        signature: argument name -> type (``*bf16``, ``i32``, ``tensordesc<bf16[128, 64]>``), constexprs apart.
        constexprs: argument name -> value.
        target: ``sm_80`` ... ``sm_121``.

    Raises:
        ValueError: an unknown target, an argument without a type, or a kernel decorated for the interpreter.
    """
    match = re.fullmatch(r"sm_(\d{2,3})a?", target)
    if match is None:
        raise ValueError(f"target must look like sm_90, got {target!r}")
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise ValueError(f"{kernel} was decorated under TRITON_INTERPRET=1: import it in a process without that")
    missing = [name for name in kernel.arg_names if name not in signature and name not in constexprs]
    if missing:
        raise ValueError(f"{kernel.__name__}: no type and no value for {', '.join(missing)}")
    # every argument stands in the signature, in the kernel's order
    full = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, full, constexprs, attrs)
    settings = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", int(match[1]), 32), options=settings)


def mma_instructions(ptx: str) -> list[str]:
    """The distinct matrix instructions of a PTX text, in order of appearance, with all their qualifiers."""
    code = re.sub(r"//[^\n]*", "", ptx)
    return list(dict.fromkeys(kind + qualifiers for kind, qualifiers in _MMA.findall(code)))


def divisible(kernel, names: list[str], by: int = 16) -> dict:
    """``attrs`` for ``compile_for``: pointers and numbers known to be multiples of ``by``, as a launch would find."""
    return {(kernel.arg_names.index(name),): [["tt.divisibility", by]] for name in names}


def report(compiled) -> Report:
    """Instruction, registers, spills and memory of what ``compile_for`` returned."""
    metadata = compiled.metadata
    registers, stack = _resources(compiled.asm["cubin"])
    return Report(
        target=f"sm_{metadata.target.arch}",
        instructions=tuple(mma_instructions(compiled.asm["ptx"])),
        registers=registers,
        spills=stack,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory, as the disassembler that comes with Triton prints them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, check=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
