"""The GEMM, compiled for every target without a GPU: the right matrix instruction, no spills, a tile that fits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from nvfp4_kernels.instructions import mma_instructions  # noqa: E402

# a kernel that the interpreter decorated cannot be compiled: hence a process of its own
COMPILE = """
import json, sys
from dataclasses import asdict
from nvfp4_kernels.instructions import compile_for, report
sys.path.insert(0, sys.argv[1])
from triton_gemm import Config, TILES, compile_arguments, gemm_kernel

def compiled(target, config, *arguments):
    signature, constexprs = compile_arguments(config, *arguments)
    result = report(compile_for(gemm_kernel, signature, constexprs, target,
                                num_warps=config.num_warps, num_stages=config.num_stages))
    return {**asdict(result), "instruction": result.instruction}

small = Config(128, 128, 64, subtiles=2, num_stages=2)
reports = [compiled(target, small, True, True, "bf16") for target in ("sm_80", "sm_90", "sm_100", "sm_120")]
shipped = [config if config.block_n < 256 else config._replace(subtiles=2) for _, config in TILES]
for config in shipped:
    reports.append(compiled("sm_90", config, True, False, "bf16"))
    reports.append(compiled("sm_90", config, False, False, "fp32", True))
print(json.dumps(reports))
"""
REST_OF_SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}


@pytest.fixture(scope="module")
def reports():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    folder = Path(__file__).parent.parent / "experiments" / "2026-11-30_kernels"
    done = subprocess.run([sys.executable, "-c", COMPILE, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_target_gets_its_matrix_instruction(reports):
    assert [(r["target"], r["instruction"]) for r in reports[:4]] == [
        ("sm_80", "mma.sync"),
        ("sm_90", "wgmma.mma_async"),
        ("sm_100", "tcgen05.mma"),
        ("sm_120", "mma.sync"),
    ]
    (kind,) = reports[2]["instructions"]
    assert "kind::f16" in kind and 0 < reports[2]["tensor_memory"] <= 512
    assert all(".f32.bf16.bf16" in r["instructions"][0] for r in (reports[0], reports[1], reports[3]))


def test_shipped_tiles_keep_wgmma_and_do_not_spill(reports):
    for r in reports[4:]:
        assert r["instruction"] == "wgmma.mma_async", r
        assert r["spills"] == 0 and r["registers"] <= 255, r


def test_tiles_fit_shared_memory(reports):
    for r in reports:
        assert 0 < r["shared"] <= REST_OF_SHARED[r["target"]], r


def test_instructions_are_read_from_ptx():
    ptx = """
    // mma.sync.aligned.m16n8k8 in a comment does not count
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd3, %rd4, p, 1, 1, 0, 0;
    @%p1 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1], %rd5, %rd6, %r2, [%r3], [%r4], %p2;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r5];
    """
    assert mma_instructions(ptx) == [
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",
    ]
    assert mma_instructions("ret;") == []
