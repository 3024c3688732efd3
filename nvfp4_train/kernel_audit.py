"""Which instruction runs: every kernel and tile of this library, compiled for a Blackwell target, without a GPU.

    nvfp4-train audit --kernels [--target sm_100] [--triton FOLDER]

The compiler chooses among instructions that give the same numbers at different speeds, and says nothing. What it chose
stands in the PTX; ``kernels/targets.py`` says what it must be. Another Triton is named by the folder it is installed in
(``pip install --target FOLDER triton==3.6.0``).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEFAULT_TARGET = "sm_100"


def kernel_report(target: str | None = None, triton_folder: str | Path | None = None, only: str = "") -> dict[str, Any]:
    """``{"triton", "target", "kernels": [row...], "faults": number}`` of everything shipped for ``target``.

    ``triton_folder``: where another Triton is installed. ``only``: words that kernel and tile must hold. The work
    is done in a process of its own: this one may have imported Triton for the interpreter.

    Raises:
        ValueError: a target or a Triton without FP4 products, or no Triton at all.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if triton_folder is not None:
        if not (Path(triton_folder) / "triton").is_dir():
            raise ValueError(f"there is no triton in {triton_folder}: pip install --target {triton_folder} triton")
        paths = [str(Path(triton_folder).absolute()), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "nvfp4_kernels.targets", target or DEFAULT_TARGET, only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 2:
        raise ValueError(done.stdout.strip())
    if done.returncode != 0:
        raise RuntimeError(f"the audit of kernels failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def kernel_lines(report: dict[str, Any]) -> list[str]:
    """The report as text: one block a kernel, its faults last."""
    lines = [f"{report['target']}, compiled by Triton {report['triton']}, no GPU involved"]
    for row in report["kernels"]:
        lines += ["", f"{row['kernel']}   [{row['tile']}]   {'ok' if not row['faults'] else 'NOT TO BE SHIPPED'}"]
        for mma in row["mma"]:
            speed = f", {mma['speed']} of Hopper FP8" if mma["speed"].endswith("x") else ""
            shares = {0: "", 1: ", one CTA an instruction", 2: ", two CTAs share an instruction"}[mma["cta_group"]]
            lines.append(f"    {mma['instruction']}")
            lines.append(
                f"    kind {mma['kind']}{speed}; blocks of {mma['block']}, {mma['scale_type']} scales by "
                f"{mma['scales_by']}; A from {mma['a_source']}; {mma['layout']}{shares}"
            )
            if row["tensor_memory"]:
                lines.append(
                    f"    tensor memory: {mma['accumulator_columns']} columns for sums, {mma['scale_columns']} for "
                    f"scales, {row['tensor_memory']} allocated of 512"
                )
        lines += [f"    {name}" for name in row["conversions"]]
        lines += [f"    machine code: {name}" for name in row["machine_code"]]
        lines.append(f"    {row['registers']} registers, {row['spills']} bytes spilled, {row['shared']} bytes shared")
        lines += [f"    FAULT: {fault}" for fault in row["faults"]]
    lines += ["", f"{len(report['kernels'])} configurations, {report['faults']} with faults"]
    return lines
