"""The kernels of MQA logits, compiled without a GPU: the matrix instruction that each target is meant to get."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent.parent / "experiments" / "kernels" / "mqa_targets.py"
EXPECTED = {
    "dense bf16, sm_80": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "dense e5m2, sm_90": "wgmma.mma_async.sync.aligned.m64n256k32.f32.e5m2.e5m2",
    "gluon dense, sm_90": "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e5m2",
    "gluon paged, sm_90": "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e5m2",
    "scaled mxfp4, sm_100": "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32",
    "scaled nvfp4, sm_100": "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
    "scaled mxfp4, sm_120": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X"
    ".f32.e2m1.e2m1.f32.ue8m0",
}


def test_each_target_gets_its_matrix_instruction():
    # a kernel that the interpreter decorated cannot be compiled: hence a process of its own
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), "--json", *EXPECTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [instruction] for name, instruction in EXPECTED.items()}
