"""Compiles the kernels of MQA logits for every target, without a GPU, and says which matrix instruction came out.

    python experiments/kernels/mqa_targets.py [--json] [NAME ...]
"""

import argparse
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from nvfp4_kernels.instructions import compile_for, divisible, mma_instructions
from nvfp4_kernels.triton import mqa_dense, mqa_direct, mqa_hopper, mqa_hopper_direct, mqa_scaled

H, D = 64, 128
POINTERS = {"ks_ptr": "*i32", "ke_ptr": "*i32", "flag_ptr": "*i32", "table_ptr": "*i32", "out_ptr": "*fp32"}
POINTERS |= {"weights_ptr": "*fp32", "q_amax_ptr": "*fp32", "k_amax_ptr": "*fp32"}


def arguments(kernel, values: dict, types: dict) -> tuple[dict, dict, dict]:
    """(signature, constexprs, attributes): what ``values`` does not fix is a pointer of ``types`` or an integer."""
    free = [name for name in kernel.arg_names if name not in values]
    signature = {name: types.get(name, POINTERS.get(name, "*u8" if name.endswith("_ptr") else "i32")) for name in free}
    aligned = [name for name in free if name.endswith("_ptr") or name in ("M", "N", "width", "page_bytes")]
    constants = {name: value for name, value in values.items() if name in kernel.arg_names}
    return signature, constants, divisible(kernel, aligned)


def dense(target: str, narrow: bool):
    kernel, tile = mqa_dense.logits_kernel, mqa_dense.E5M2 if narrow else mqa_dense.BF16
    element = "fp8e5" if narrow else "bf16"
    types = {"q_desc": (tile.columns, D), "k_desc": (tile.keys, D)}
    types = {name: f"tensordesc<{element}[{rows}, {columns}]>" for name, (rows, columns) in types.items()}
    values = dict(D=D, HP=H, QB=tile.columns // H, BN=tile.keys, COMPRESSED=False, CLEAN=True, BF16_BITS=False)
    values |= dict(STAGES=tile.stages)
    values |= dict(q_amax_ptr=None, k_amax_ptr=None) if narrow else dict(flag_ptr=None)
    signature, constants, attributes = arguments(kernel, values, types)
    return compile_for(
        kernel, signature, constants, target, num_warps=tile.warps, num_stages=tile.stages, attrs=attributes,
        enable_fp_fusion=True,
    )  # fmt: skip


def direct(target: str, paged: bool):
    """NVFP4 pages, or lists of MXFP4 keys; in bfloat16."""
    kernel, tile = mqa_direct.direct_kernel, mqa_direct.WIDE
    block = 16 if paged else 32
    values = dict(H=H, HP=H, D=D, BLOCK=block, SCALES=D // block, EACH=1, QB=1, BN=tile.keys, E5M2=False, CLEAN=True)
    values |= dict(COMPRESSED=False, BF16_BITS=False, STAGES=tile.stages, flag_ptr=None, ks_ptr=None)
    values |= dict(MODE=1, PAGE=64, scales_ptr=None) if paged else dict(MODE=2, PAGE=0, ke_ptr=None)
    values |= {} if paged else dict(q_amax_ptr=None, k_amax_ptr=None)
    signature, constants, attributes = arguments(kernel, values, {})
    return compile_for(
        kernel, signature, constants, target, num_warps=tile.warps, num_stages=tile.stages, attrs=attributes,
        enable_fp_fusion=True,
    )  # fmt: skip


def scaled(target: str, nvfp4: bool):
    kernel, scales = mqa_scaled.scaled_kernel, "*fp8e4nv" if nvfp4 else "*u8"
    values = dict(H=H, HP=H, QB=mqa_scaled.COLUMNS // H, BN=mqa_scaled.KEYS, D=D, BLOCK=16 if nvfp4 else 32)
    values |= dict(COMPRESSED=False, CLEAN=True, BF16_BITS=False, STAGES=mqa_scaled.STAGES)
    values |= {} if nvfp4 else dict(q_amax_ptr=None, k_amax_ptr=None)
    signature, constants, attributes = arguments(kernel, values, {"q_scales_ptr": scales, "k_scales_ptr": scales})
    return compile_for(
        kernel, signature, constants, target, num_warps=mqa_scaled.WARPS, num_stages=mqa_scaled.STAGES,
        attrs=attributes, enable_fp_fusion=True,
    )  # fmt: skip


def gluon(kernel, values: dict, types: dict):
    signature, constants, attributes = arguments(kernel, values, types)
    full = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    source = GluonASTSource(kernel, full, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, enable_fp_fusion=True))


def hopper():
    tile = mqa_hopper.Tile()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=8, rank=2)
    types = {"q_desc": f"tensordesc<fp8e5[128, {D}],{layout!r}>", "k_desc": f"tensordesc<fp8e5[64, {D}],{layout!r}>"}
    return gluon(mqa_hopper.hopper_kernel, dict(D=D, HP=H, STAGES=tile.stages, CLEAN=True, FADD=tile.fadd), types)


def hopper_direct(paged: bool):
    tile = mqa_hopper_direct.Tile()
    values = dict(HP=H, D=D, EACH=1, QB=1, PAGE=64 * paged, STAGES=tile.stages, CLEAN=True, FADD=tile.fadd)
    values |= dict(UNROLL=tile.unroll) | (dict(scales_ptr=None, ks_ptr=None) if paged else dict(table_ptr=None))
    return gluon(mqa_hopper_direct.hopper_direct_kernel, values, {"q_ptr": "*fp8e5"})


CASES = {
    "dense e5m2, sm_90": lambda: dense("sm_90", True),
    "dense bf16, sm_80": lambda: dense("sm_80", False),
    "dense bf16, sm_90": lambda: dense("sm_90", False),
    "dense e5m2, sm_89": lambda: dense("sm_89", True),
    "paged nvfp4, sm_90": lambda: direct("sm_90", True),
    "listed mxfp4, sm_80": lambda: direct("sm_80", False),
    "gluon dense, sm_90": hopper,
    "gluon ranges, sm_90": lambda: hopper_direct(False),
    "gluon paged, sm_90": lambda: hopper_direct(True),
    "scaled mxfp4, sm_100": lambda: scaled("sm_100", False),
    "scaled nvfp4, sm_100": lambda: scaled("sm_100", True),
    "scaled mxfp4, sm_120": lambda: scaled("sm_120", False),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("names", nargs="*", default=list(CASES))
    wanted = parser.parse_args()
    found = {name: mma_instructions(CASES[name]().asm["ptx"]) for name in wanted.names}
    print(json.dumps(found) if wanted.json else "\n".join(f"{name:24}{', '.join(x)}" for name, x in found.items()))


if __name__ == "__main__":
    main()
