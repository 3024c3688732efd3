"""The audit of kernels: all that is shipped for Blackwell compiles to the fast FP4 instruction; what does not is told.

Under the Triton that is installed and under the one of torch 2.11, where ``make test`` has put it (.triton-3.6).
Triton's compiler needs no GPU; each audit is a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton")
from nvfp4_kernels.instructions import Report  # noqa: E402
from nvfp4_kernels.ptx import conversions, matrix_instructions  # noqa: E402
from nvfp4_kernels.targets import Configuration, faults  # noqa: E402
from nvfp4_train import kernel_audit  # noqa: E402
from nvfp4_train.cli import app  # noqa: E402
from nvfp4_train.kernel_audit import kernel_lines, kernel_report  # noqa: E402

OLD_TRITON = Path(os.environ.get("NVFP4_OLD_TRITON", Path(__file__).parent.parent / ".triton-3.6"))
TRITONS = [
    pytest.param(None, id="installed"),
    pytest.param(
        OLD_TRITON, id="3.6",
        marks=pytest.mark.skipif(
            not (OLD_TRITON / "triton").is_dir(), reason=f"no Triton 3.6 in {OLD_TRITON}: make .triton-3.6"
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("folder", TRITONS)
def test_everything_shipped_for_sm_100_runs_the_fast_instruction(folder):
    report = kernel_report("sm_100", folder, "matmul|MQA|convert|quantize stochastic8")
    assert report["faults"] == 0, "\n".join(kernel_lines(report))
    products = [row for row in report["kernels"] if row["kernel"].startswith("matmul")]
    assert len(products) == 8
    for row in products:
        (mma,) = row["mma"]
        kind, block, scales = ("mxf4nvf4", 16, "ue4m3") if "nvfp4" in row["kernel"] else ("mxf4", 32, "ue8m0")
        assert (mma["kind"], mma["block"], mma["scale_type"], mma["speed"]) == (kind, block, scales, "4x"), row
        assert (mma["layout"], mma["scales_by"], mma["a_source"]) == ("TN", "tcgen05.cp", "shared"), row
        assert mma["cta_group"] == 1 and row["spills"] == 0 and 0 < row["registers"] <= 255, row
        assert row["machine_code"] == ["UTCOMMA.4X" if block == 16 else "UTCOMMA"], row
        sums = mma["accumulator_columns"]
        assert sums == int(row["tile"].split("x")[1]) and sums + mma["scale_columns"] <= row["tensor_memory"] <= 512
    logits = {
        row["kernel"]: [(m["kind"], m["block"], m["scale_type"]) for m in row["mma"]] for row in report["kernels"][8:10]
    }
    assert logits == {"MQA logits nvfp4": [("mxf4nvf4", 16, "ue4m3")], "MQA logits mxfp4": [("mxf4", 32, "ue8m0")]}
    conversions = {row["kernel"]: (row["conversions"], row["machine_code"]) for row in report["kernels"][10:]}
    merged = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"
    stochastic = (["cvt.rs.satfinite.e2m1x4.f32"], [f"{merged}.RS"])
    assert conversions == {
        "quantize stochastic8: rows and rotated columns": stochastic,
        "convert nearest": (["cvt.rn.satfinite.e2m1x2.f32"], [merged]),
        "convert stochastic8": stochastic,
    }


@pytest.mark.parametrize("folder", TRITONS)
@pytest.mark.parametrize("target", ["sm_103", "sm_120", "sm_121"])
def test_other_blackwells(folder, target):
    if folder is not None and target == "sm_121":
        with pytest.raises(ValueError, match="Triton 3.6.0 has no FP4 product for sm_121: install triton>=3.8"):
            kernel_report(target, folder)
        return
    report = kernel_report(target, folder, "nvfp4 bf16 small")
    assert report["faults"] == 0, "\n".join(kernel_lines(report))
    family = "tcgen05.mma" if target == "sm_103" else "mma.sync"
    for row in report["kernels"]:
        assert [mma["family"] for mma in row["mma"]] == [family] * len(row["mma"]), row
        assert all(mma["kind"] in ("mxf4nvf4", "mxf4") and mma["layout"] == "TN" for mma in row["mma"]), row


def test_a_target_without_fp4_and_a_folder_without_triton_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'sm_90' has no FP4 tensor cores: choose from sm_100, sm_103, sm_120, sm_121"):
        kernel_report("sm_90")
    with pytest.raises(ValueError, match="there is no triton in"):
        kernel_report("sm_100", tmp_path)


SLOW = """
import json, sys
sys.path.insert(0, sys.argv[1])
import slow_fp4
from nvfp4_kernels.instructions import compile_for, report
from nvfp4_kernels.targets import Configuration, faults
from nvfp4_kernels.triton import native_matmul as native

def said(kernel, arguments, multiplies="nvfp4", warps=4):
    found = report(compile_for(kernel, *arguments, "sm_100", num_warps=warps))
    return faults(found, Configuration("", "", "sm_100", multiplies, None))

too_large = native.NativeTile(256, 256, 256, 8, 2)
kernel = slow_fp4.pointwise_kernel
print(json.dumps({
    "tile over tensor memory": said(native.native_matmul_kernel, native.compile_arguments(too_large, 16), warps=8),
    "pointwise scales": said(kernel, slow_fp4.arguments("fp8e4nv", k_packed=True)),
    "K-minor operand": said(kernel, slow_fp4.arguments("u8", k_packed=False, vector=32), "mxfp4"),
    "scales of 32 for NVFP4": said(kernel, slow_fp4.arguments("u8", k_packed=True, vector=32)),
}))
"""


def test_what_a_compiler_makes_slow_without_a_word_is_refused():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SLOW, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert "has no matrix instruction at all" in said["tile over tensor memory"]
    assert "takes 576 columns of tensor memory of 512" in said["tile over tensor memory"]
    assert said["pointwise scales"] == [
        "takes its scales through registers (tcgen05.st) and waits for them at each step"
    ]
    slow, layout, _ = said["K-minor operand"]
    assert "kind::mxf8f6f4" in slow and "not with mxf4 or mxf4nvf4" in slow
    assert layout == "is TT, not TN: an operand is not packed along K"
    assert "kind::mxf4." in said["scales of 32 for NVFP4"][0]


NVFP4_PTX = """
    mov.b32 %r9, {descriptor};
    @%p1 tcgen05.cp.cta_group::1.warpx4.32x128b [ %r3 + 0 ], %rd1;
    @%p1 tcgen05.cp.cta_group::1.warpx4.32x128b [ %r4 + 16 ], %rd2;
    // tcgen05.mma.cta_group::1.kind::f16 in a comment does not count
    @%p2 tcgen05.mma.cta_group::{group}.kind::mxf4nvf4.block_scale.scale_vec::4X [ %r1 + 0 ], {a}, %rd5, %r9,
        [ %r3 + 0 ], [ %r4 + {offset} ], %p3;
"""
N_256, M_128, E8M0, A_TRANSPOSED = 256 // 8 << 17, 1 << 27, 1 << 23, 1 << 15


def read(descriptor=N_256 | M_128, group=1, a="%rd4", offset=16):
    (mma,) = matrix_instructions(NVFP4_PTX.format(descriptor=descriptor, group=group, a=a, offset=offset))
    return mma


def test_fields_are_read_from_ptx():
    mma = read()
    assert (mma.kind, mma.block, mma.scale_type, mma.layout, mma.speed) == ("mxf4nvf4", 16, "ue4m3", "TN", "4x")
    assert (mma.a_source, mma.scales_by, mma.cta_group) == ("shared", "tcgen05.cp", 1)
    assert (mma.accumulator_columns, mma.scale_columns) == (256, 4 + 256 // 32)
    assert read(N_256 | E8M0).scale_type == "ue8m0"
    assert read(N_256 | A_TRANSPOSED).layout == "NN"
    assert read(group=2).cta_group == 2
    assert read(a="[ %r7 + 0 ]").a_source == "tensor memory"
    assert read(offset=20).scales_by == "tcgen05.st"


def test_a_descriptor_that_is_computed_proves_nothing():
    mma = matrix_instructions(NVFP4_PTX.replace("mov.b32 %r9", "add.s32 %r9, %r8").format(
        descriptor=1, group=1, a="%rd4", offset=16))[0]  # fmt: skip
    assert mma.scale_type == "?" and mma.layout == "?"
    found = Report("sm_100", (mma.instruction,), 32, 0, 1000, 512, (mma,))
    assert len(faults(found, Configuration("", "", "sm_100", "nvfp4", None))) == 2


def test_older_instructions_and_conversions_are_read_too():
    wgmma, shared, ampere = matrix_instructions("""
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1, %f2}, {%r1, %r2}, %rd2, p, 1, 1, 1;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    """)
    assert (wgmma.a_source, wgmma.layout, shared.a_source, shared.layout) == ("registers", "TT", "shared", "TN")
    assert (ampere.family, ampere.layout, ampere.block, ampere.speed) == ("mma.sync", "TN", 0, "")
    assert conversions("cvt.rn.satfinite.e2m1x2.f32 a, %f1, %f2; cvt.rn.bf16x2.f32 b, %f1, %f2;") == [
        "cvt.rn.satfinite.e2m1x2.f32"
    ]


def test_faults_of_a_report():
    mma = read()
    good = Report("sm_100", (mma.instruction,), 128, 0, 200_000, 512, (mma,))
    wanted = Configuration("", "", "sm_100", "nvfp4", None)
    assert faults(good, wanted) == []
    bad = Report("sm_100", (mma.instruction,), 255, 16, 300_000, 576, (mma,))
    assert faults(bad, wanted) == [
        "spills 16 bytes a thread", "takes 300000 bytes of shared memory of 232448",
        "takes 576 columns of tensor memory of 512",
    ]  # fmt: skip
    assert (
        "has no cvt.rs" in faults(good, Configuration("", "", "sm_100", None, None, "cvt.rs.satfinite.e2m1x4.f32"))[0]
    )


@pytest.mark.parametrize("told, code", [([], 0), (["is TT, not TN"], 1)])
def test_command_prints_the_report_and_fails_with_it(told, code, monkeypatch):
    row = dict(kernel="matmul", tile="small", mma=[], conversions=[], machine_code=["UTCOMMA"], faults=told)
    row |= dict(registers=1, spills=0, shared=2, tensor_memory=0)
    report = {"triton": "3", "target": "sm_100", "kernels": [row], "faults": len(told)}
    asked = []
    monkeypatch.setattr(kernel_audit, "kernel_report", lambda *given: asked.append(given) or report)
    found = CliRunner().invoke(app, ["audit", "--kernels", "--target", "sm_100"])
    assert found.exit_code == code and asked == [("sm_100", None)]
    assert "machine code: UTCOMMA" in found.output and all(f"FAULT: {fault}" in found.output for fault in told)
    assert json.loads(CliRunner().invoke(app, ["audit", "--kernels", "--json"]).output) == report
