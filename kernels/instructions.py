"""compile_for: a Triton kernel for any NVIDIA target, without a GPU; and which matrix instruction came out.

Tensor cores take the same operands through several instructions, some at half speed, and a compiler chooses without a
word. The PTX says which (ptx.py). Registers and spills come from the assembler, shared memory from Triton's own record.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nvfp4_kernels.ptx import Mma, conversions, matrix_instructions, mma_instructions

__all__ = ["Report", "compile_for", "divisible", "machine_instructions", "mma_instructions", "report"]

TENSOR_MEMORY = 512  # columns of a multiprocessor, from sm_100 on (sm_12x has none)


@dataclass(frozen=True)
class Report:
    """What one compiled kernel holds; ``instructions`` are the distinct MMA kinds in PTX order of appearance."""

    target: str
    instructions: tuple[str, ...]
    registers: int  # per thread
    spills: int  # bytes that a thread writes to its stack for want of registers
    shared: int  # bytes per program
    tensor_memory: int  # columns of 512 that the kernel asks for; 0 before sm_100
    mma: tuple[Mma, ...] = ()  # what the PTX says about each of the instructions
    conversions: tuple[str, ...] = ()  # distinct conversions to E2M1
    machine_code: tuple[str, ...] = ()  # the same two in the machine code (SASS)

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


def divisible(kernel, names: list[str], by: int = 16) -> dict:
    """``attrs`` for ``compile_for``: pointers and numbers known to be multiples of ``by``, as a launch would find."""
    return {(kernel.arg_names.index(name),): [["tt.divisibility", by]] for name in names}


def report(compiled) -> Report:
    """Instructions, registers, spills and memory of what ``compile_for`` returned."""
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    registers, stack = _resources(compiled.asm["cubin"])
    return Report(
        target=f"sm_{metadata.target.arch}",
        instructions=tuple(mma_instructions(ptx)),
        registers=registers,
        spills=_spills(ptx, metadata) if stack else 0,  # a stack may be there for other reasons
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
        mma=tuple(matrix_instructions(ptx)),
        conversions=tuple(conversions(ptx)),
        machine_code=tuple(machine_instructions(compiled.asm["cubin"])),
    )


def machine_instructions(cubin: bytes) -> list[str]:
    """The distinct matrix instructions and conversions to E2M1 in machine code, such as ``UTCOMMA.4X``: what a GPU
    executes. Empty where Triton's disassembler does not know the target yet."""
    text = _disassembled(cubin, "-sass")
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.M)
    return list(dict.fromkeys(line for line in lines if "MMA" in line or "E2M1" in line))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory, as the disassembler that comes with Triton prints them."""
    text = _disassembled(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _disassembled(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool("cuobjdump"), what, file.name], capture_output=True, text=True).stdout


def _spills(ptx: str, metadata) -> int:
    """Bytes of spill stores, as Triton's own assembler for the target says with the options Triton gives it."""
    # Tritons differ in which of their assemblers serves which target, and one rejects the PTX meant for the other
    assembler = get_ptxas(metadata.target.arch)
    options = [] if getattr(metadata, "enable_fp_fusion", False) else ["--fmad=false"]
    if int(assembler.version.split(".")[0]) >= 13:
        options.append("--regAllocOptLevel=2")  # Triton's, for these assemblers
    architecture = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler.path, "-v", *options, f"--gpu-name={architecture}", source]
        said = subprocess.run([*command, "-o", Path(folder) / "kernel.cubin"], capture_output=True, text=True)
    found = re.findall(r"(\d+) bytes spill stores", said.stderr)
    assert found, said.stderr
    return sum(map(int, found))


def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
