"""Run folders made up from closed-form curves, so that every number of a report can be worked out by hand."""

import json
import math
from pathlib import Path

TOKENS_PER_STEP = 1000
STEPS = 200
BYTES_PER_TOKEN = 4.0


def control_loss(tokens: float) -> float:
    """Loss falls by 0.5 nats with every factor of ten in tokens; 2.0 at the end (200k tokens)."""
    return 2.0 - 0.5 * math.log10(tokens / (STEPS * TOKENS_PER_STEP))


def write_run(
    out: Path,
    *,
    gaps: dict[str, dict[int, float]],
    seed_offsets: dict[int, float],
    roles: dict[str, str] | None = None,
    band: float | None = 1.0,
    failed: tuple[tuple[str, int], ...] = (),
    missing: tuple[tuple[str, int], ...] = (),
    record: dict | None = None,
) -> Path:
    """Write OUT for a control named bf16 and the arms of `gaps` (arm -> seed -> relative gap, all along training).

    The control's loss of a seed is `control_loss(tokens) * (1 + seed_offsets[seed])`.
    """
    roles = roles or {}
    arms = [{"name": "bf16", "recipe": "bf16", "role": "control", "recipe_text": "name: bf16\n"}]
    arms += [
        {"name": arm, "recipe": arm, "role": roles.get(arm, "arm"), "recipe_text": _recipe_text(arm)} for arm in gaps
    ]
    out.mkdir(parents=True, exist_ok=True)
    text = "name: synthetic\nequivalence: {percent: 1.0}\n"
    (out / "experiment.yaml").write_text(text)
    (out / "record.json").write_text(json.dumps(_record(arms, list(seed_offsets), band, text) | (record or {})))
    for arm in arms:
        for seed, offset in seed_offsets.items():
            key = (arm["name"], seed)
            if key in missing:
                continue
            gap = gaps.get(arm["name"], {}).get(seed, 0.0)
            quantized = roles.get(arm["name"], "arm") == "arm" and arm["name"] != "bf16"
            write_job(
                out / arm["name"] / f"seed{seed}", arm["name"], seed, (1 + offset) * (1 + gap), quantized, key in failed
            )
    return out


def write_job(folder: Path, arm: str, seed: int, factor: float, quantized: bool, failed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    last = STEPS // 2 if failed else STEPS
    for step in range(10, last + 1, 10):
        tokens = step * TOKENS_PER_STEP
        loss = control_loss(tokens) * factor
        lines.append(
            {
                "kind": "train",
                "step": step,
                "tokens": tokens,
                "loss": loss,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens_per_s": 5e4,
            }
        )
        if step % 20 == 0:
            lines.append(
                {
                    "kind": "eval",
                    "step": step,
                    "tokens": tokens,
                    "loss": loss,
                    "loss_bf16_forward": loss * 0.998 if quantized else None,
                }
            )
    if quantized:
        lines.append({"kind": "spike", "step": 30, "loss": 9.0})
    final = control_loss(STEPS * TOKENS_PER_STEP) * factor
    failure = {"step": last, "tensor": "model.layers.3.mlp.down_proj.weight.grad", "checkpoint": "checkpoint/step80"}
    result = {
        "arm": arm,
        "seed": seed,
        "status": "failed" if failed else "finished",
        "steps": last,
        "tokens": last * TOKENS_PER_STEP,
        "final_loss": None if failed else final,
        "final_loss_bf16_forward": final * 0.998 if quantized and not failed else None,
        "seconds": 75.3,
        "tokens_per_s": 51234.5,
        "peak_memory_bytes": 3 * 2**30,
        "failure": failure if failed else None,
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps(result))


def _record(arms: list[dict], seeds: list[int], band: float | None, text: str) -> dict:
    quantized = [arm["name"] for arm in arms if arm["role"] == "arm"]
    names = [
        f"model.layers.{i}.{part}"
        for i in range(4)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    ]
    skipped = [
        {"name": "lm_head", "kind": "Linear", "reason": "keep_bf16.modules names it (lm_head)"},
        {"name": "model.embed_tokens", "kind": "Embedding", "reason": "an embedding has no GEMM"},
    ]
    flops = [{"gemm": gemm, "format": "nvfp4 x nvfp4", "share": 0.28} for gemm in ("fprop", "dgrad", "wgrad")] + [
        {"gemm": gemm, "format": "bf16 x bf16", "share": 0.16 / 3} for gemm in ("fprop", "dgrad", "wgrad")
    ]
    plain = [{"gemm": gemm, "format": "bf16 x bf16", "share": 1 / 3} for gemm in ("fprop", "dgrad", "wgrad")]
    return {
        "name": "synthetic",
        "question": "Does the recipe train as well as BF16?",
        "experiment": {"model": {"hidden_size": 64}},
        "yaml": text,
        "arms": arms,
        "seeds": seeds,
        "tokens_per_step": TOKENS_PER_STEP,
        "total_steps": STEPS,
        "parameters": 10_000,
        "bytes_per_token": BYTES_PER_TOKEN,
        "equivalence": None if band is None else {"percent": band},
        "data": {"sha256": "ab" * 32, "train_tokens": 5_000_000, "held_out_tokens": 120_000, "source": "stdlib"},
        "versions": {"python": "3.12.3", "torch": "2.13.0", "nvfp4_train": "0.1.0"},
        "hardware": {"device": "cpu", "name": "two cores", "backend": {"quantize": "reference", "matmul": "emulated"}},
        "conversion": {name: {"converted": names, "skipped": skipped} for name in quantized},
        "flops": {arm["name"]: flops if arm["name"] in quantized else plain for arm in arms},
    }


def _recipe_text(name: str) -> str:
    return (
        f'name: {name}\nsource: "arXiv:2509.25149"\nfprop:\n'
        "  input:       {format: nvfp4, block: 1x16,  rounding: nearest}\n"
        "  weight:      {format: nvfp4, block: 16x16, rounding: nearest}\n"
        "dgrad:\n  grad_output: {format: nvfp4, block: 1x16,  rounding: stochastic}\n"
        "  weight:      {format: nvfp4, block: 16x16, rounding: nearest}\n"
    )
