"""nt.audit: what it counts, what it proves, what it leaves behind, and what it says to bad questions."""

import json

import pytest
import torch
import torch.nn.functional as F
from audit_faults import Model, microbatches, model
from tiny_experiment import write_experiment
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.auditing.matmuls import ForeignMatmuls
from nvfp4_train.cli import app
from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.report import render
from nvfp4_train.experiment.train import run_job
from nvfp4_train.linear import QuantizedLinear


def claims(found) -> dict[str, int]:
    return {row["claim"]: row["cases"] for row in found.proven}


def named(found) -> set[tuple[str, str]]:
    return {(finding.check, finding.layer) for finding in found.findings}


class Foreign(nn.Module):
    """Products by every road that leads past nn.Linear; sizes are primes, so that each count is recognised."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3, 5, 2))
        self.conv = nn.Conv1d(2, 11, 3, bias=False)

    def forward(self, x):  # [3, 13, 7]
        y = F.linear(x, self.left.T)  # [3, 13, 5]
        y = torch.einsum("bij,bjk->bik", y, self.right)  # [3, 13, 2]
        y = self.conv(y.transpose(1, 2))  # [3, 11, 11]
        return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])


def test_products_that_the_library_does_not_own_are_counted_forward_and_backward():
    net, x = Foreign(), torch.randn(3, 13, 7, requires_grad=True)
    mode = ForeignMatmuls(net)
    with mode.watching(net):
        net(x).square().sum().backward()
    linear, grouped = 2 * 39 * 7 * 5, 2 * 3 * 13 * 5 * 2
    convolution, scores = 2 * 3 * 11 * 11 * 2 * 3, 2 * 3 * 11 * 11 * 11 * 2
    for kind in ("fprop", "dgrad", "wgrad"):
        assert mode.flops[kind, "left"] == linear
        assert mode.flops[kind, "right"] == grouped
        assert mode.flops[kind, "conv.weight"] == convolution
    forward = sum(flops for (kind, where), flops in mode.flops.items() if kind == "attention" and where == "")
    assert sum(flops for (kind, _), flops in mode.flops.items() if kind == "attention") in (3 * scores, 3.5 * scores)
    assert forward  # the backward of attention hangs in no module
    assert not mode.unknown and not any(kind == "other" for kind, _ in mode.flops)


def test_a_recomputed_forward_is_not_taken_for_a_backward():
    net, x = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh()), torch.randn(4, 6, requires_grad=True)
    mode = ForeignMatmuls(net)
    with mode.watching(net):
        checkpoint(net, x, use_reentrant=False).sum().backward()
    once = 2 * 4 * 6 * 5
    assert mode.flops == {("fprop", "0.weight"): 2 * once, ("dgrad", "0.weight"): once, ("wgrad", "0.weight"): once}


def test_shares_are_of_the_whole_step():
    net = model("nvidia_nvfp4")
    found = nt.audit(net, microbatches(net))
    tokens, padded, width = 46, 48, 48
    one_block = width * width * (1 + 1 + 2 + 2)
    quantized = 2 * 2 * one_block * (tokens + tokens + padded)  # two microbatches; Wgrad is padded
    head = 2 * 2 * tokens * width * 32 * 3
    rows = found.coverage["phases"][0]
    assert sum(row["flops"] for row in rows if row["quantized"]) == quantized
    assert sum(row["flops"] for row in rows if row["layer"] == "lm_head.weight") == head
    attention = sum(row["flops"] for row in rows if row["gemm"] == "attention")
    assert attention > 0
    assert found.coverage["quantized"] == pytest.approx(quantized / (quantized + head + attention))
    fprop = found.coverage["by_gemm"]["fprop"]
    assert fprop["quantized"] == pytest.approx(one_block / (one_block + width * 32))
    assert found.coverage["sentence"].startswith(f"{100 * found.coverage['quantized']:.1f}% of the step's matmul FLOPs")
    (kept,) = [row for row in found.coverage["skipped"] if row["layer"] == "lm_head.weight"]
    assert kept["reason"] == "keep_bf16: 'lm_head'"
    row = next(row for row in rows if row["gemm"] == "wgrad" and row["ours"])
    assert row["a"] == {
        "format": "nvfp4", "block": "1x16", "rounding": "stochastic", "hadamard": "16 points, signs D7E8"
    }  # fmt: skip


def test_a_required_share_that_is_not_reached_fails():
    net = model("nvidia_nvfp4")
    assert nt.audit(net, microbatches(net)[:1], require=0.5).ok
    assert named(nt.audit(net, microbatches(net)[:1], require=0.99)) == {("coverage", "")}


def test_a_declared_mismatch_is_shown_with_its_size_and_does_not_fail():
    net = model("nvidia_nvfp4_1d_weights")
    found = nt.audit(net, microbatches(net))
    assert found.ok and "Dgrad's weight is bitwise Fprop's" not in claims(found)
    assert all(not row["declared"] and not row["bitwise"] and 0.05 < row["mismatch"] < 0.3 for row in found.weights)
    same = nt.audit(net := model("nvidia_nvfp4"), microbatches(net))
    assert all(row["declared"] and row["bitwise"] and row["mismatch"] == 0 for row in same.weights)


def test_phases_are_entered_at_their_step_and_weigh_by_their_length():
    net = model("nvidia_nvfp4_late_fprop")
    found = nt.audit(net, microbatches(net), total_steps=50)
    assert found.ok
    assert claims(found)["schedule: the formats change at step 41 of 50, not before"] == 1
    first, second = (sum(r["quantized"] and r["gemm"] == "fprop" for r in rows) for rows in found.coverage["phases"])
    assert first == 4 and second == 0
    late = found.coverage["by_gemm"]["fprop"]["quantized"] / found.coverage["by_gemm"]["dgrad"]["quantized"]
    assert 0.80 < late < 0.83  # 41 of 50 steps; the share of Fprop in a step's FLOPs hardly changes


def test_the_model_is_left_as_it_was():
    net = model("nvidia_nvfp4_late_fprop")
    losses = microbatches(net)
    losses[0]().backward()
    nt.set_progress(net, 99, 100)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    grads = {name: p.grad for name, p in net.named_parameters()}
    plans = [layer.plan for layer in net.modules() if isinstance(layer, QuantizedLinear)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    nt.audit(net, losses)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is grads[name] for name, p in net.named_parameters())
    assert [layer.plan for layer in net.modules() if isinstance(layer, QuantizedLinear)] == plans
    assert not ledger.observed() and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_main_grad_is_checked_and_given_back():
    net = model("nvidia_nvfp4")
    for layer in net.modules():
        if isinstance(layer, QuantizedLinear):
            layer.weight.main_grad = torch.full_like(layer.weight, 3.0)
    found = nt.audit(net, microbatches(net))
    assert found.ok, str(found)
    points = "wgrad points where the straight-through surrogate of the operands that ran points"
    assert claims(found)[points] == 4
    assert all((p.main_grad == 3.0).all() for p in net.parameters() if hasattr(p, "main_grad"))


def test_a_compiled_model_is_judged_in_its_compiled_step():
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48, bias=False))
    nt.convert(net, "nvidia_nvfp4")
    net.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(46, 48, requires_grad=True)
    found = nt.audit(net, lambda: net(x).square().mean())
    assert found.ok, str(found)
    assert claims(found)["the compiled step runs the GEMMs of the eager step"] == 2 * 3
    assert any("compiled" in note for note in found.notes)


def test_checkpointed_and_frozen_layers_are_healthy():
    net = model("nvidia_nvfp4")
    net.layers[0].up.weight.requires_grad_(False)
    whole = net.layers[0].forward
    net.layers[0].forward = lambda x: checkpoint(whole, x, use_reentrant=False)
    found = nt.audit(net, microbatches(net))
    assert found.ok, str(found)


@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "quartet"])
@pytest.mark.parametrize("kind", ["GPT2Config", "MixtralConfig"])
def test_experts_and_conv1d_are_healthy(kind, recipe):
    import transformers

    sizes = {
        "GPT2Config": dict(n_embd=48, n_layer=1, n_head=2, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
        "MixtralConfig": dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=4,
        ),
    }  # fmt: skip
    config = getattr(transformers, kind)(vocab_size=32, bos_token_id=0, eos_token_id=0, **sizes[kind])
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config)
    report = nt.convert(net, recipe)
    found = nt.audit(net, microbatches(net, lambda tokens: net(input_ids=tokens, use_cache=False).logits))
    assert found.ok, str(found)
    assert len(report.converted) == (4 if kind == "GPT2Config" else 5)
    rows = {row["layer"] for row in found.coverage["phases"][0] if row["ours"]}
    assert all(any(row.startswith(name) for row in rows) for name in report.converted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "nvidia_nvfp4_1d_weights", "mxfp4"])
def test_a_healthy_run_on_a_gpu(recipe):
    net = model(recipe).cuda()
    found = nt.audit(net, microbatches(net), recipe)
    assert found.ok, str(found)
    assert {row["a"]["format"] for row in found.coverage["phases"][0] if row["quantized"]} <= {"nvfp4", "mxfp4"}


def test_a_layer_that_the_recipe_does_not_keep_must_run_quantized():
    net = Model()
    net.layers[0].up = nn.utils.parametrizations.weight_norm(net.layers[0].up)
    nt.convert(net, "nvidia_nvfp4")
    found = nt.audit(net, microbatches(net))
    (finding,) = found.findings
    assert (finding.check, finding.layer) == ("not_converted", "layers.0.up") and "parametrized" in finding.message
    kept = nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {"modules": ["lm_head", "layers.0.up"]}}
    assert nt.audit(net, microbatches(net), kept).ok


def test_an_unknown_mechanism_counts_as_not_proven(monkeypatch):
    from nvfp4_train.auditing import operands

    monkeypatch.setattr(operands, "ROUNDINGS", ("nearest",))
    net = model("nvidia_nvfp4")
    found = nt.audit(net, microbatches(net))
    assert {check for check, _ in named(found)} == {"not_checked"}
    assert "rounding stochastic" in found.findings[0].message


def test_what_a_cuda_graph_captured_counts_times_its_replays(monkeypatch):
    layer = nt.QuantizedLinear(16, 16, label="layer")
    x = torch.randn(16, 16, requires_grad=True)
    monkeypatch.setattr(ledger, "_capturing", lambda: True)
    seen = []
    observer = type("Observer", (), {"quantized": seen.append, "multiplied": seen.append})()
    with ledger.recording() as log, ledger.observing(observer):
        layer(x).sum().backward()
    assert log.captured and not seen  # looking at tensors would break a capture
    assert [row["calls"] for row in log.gemms(replays=5)] == [5, 5, 5]
    assert log.gemms(replays=5)[0]["flops"] == 5 * 2 * 16**3
    assert all(row["calls"] == 0 for row in log.operands(replays=0))


@pytest.mark.parametrize(
    "losses, text",
    [(lambda: torch.zeros(3, requires_grad=True), "one number"), (lambda: torch.tensor(float("nan")), "not finite")],
)
def test_a_loss_that_cannot_be_audited_is_refused(losses, text):
    with pytest.raises(ValueError, match=text):
        nt.audit(model("nvidia_nvfp4"), losses)


def test_a_model_without_converted_layers_needs_a_recipe():
    net = Model()
    with pytest.raises(ValueError, match="no converted layer"):
        nt.audit(net, microbatches(net))
    assert named(nt.audit(net, microbatches(net), "nvidia_nvfp4")) >= {("not_converted", "")}
    assert nt.audit(net, microbatches(net), "bf16").ok


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_the_command_exits_0_only_if_everything_asked_for_was_proven():
    good = run("nvidia_nvfp4", "--require", "75%", "--json")
    assert good.exit_code == 0
    report = json.loads(good.stdout)
    assert report["ok"] and report["audits"]["nvidia_nvfp4"]["findings"] == []
    bad = run("nvidia_nvfp4_no_sr", "--require", "0.99")
    assert bad.exit_code == 1 and "NOT PROVEN  coverage" in bad.stdout


@pytest.mark.parametrize(
    "arguments, word",
    [
        ([], "give one of"), (["nvidia_nvpf4"], "nvidia_nvfp4"), (["bf16", "--require", "150%"], "--require"),
        (["bf16", "--arm", "x"], "--arm"), (["bf16", "--kernels"], "give one of"),
    ],
)  # fmt: skip
def test_bad_questions_are_one_sentence(arguments, word):
    result = run(*arguments)
    assert result.exit_code == 2 and word in result.stderr and "Traceback" not in result.output


def test_an_experiment_is_audited_arm_by_arm_and_its_report_shows_it(tmp_path):
    path = write_experiment(tmp_path, {"training.steps": 2, "evaluation.every": 2, "audit.every": 1})
    for arm in ("bf16", "nvfp4"):
        run_job(load_experiment(path), arm, 1, tmp_path / "out")
    result = run(str(path), "--out", str(tmp_path / "out"), "--sensitivity")
    assert result.exit_code == 0, result.output
    assert "keep_bf16:" in result.stdout
    kept = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert list(kept) == ["nvfp4"] and kept["nvfp4"]["ok"] and "after 2 steps" in kept["nvfp4"]["notes"][0]
    page = render(tmp_path / "out").read_text()
    assert "all proven" in page and kept["nvfp4"]["coverage"]["sentence"] in page.replace("&#39;", "'")
    assert "nvfp4 seed 1: 2 audits" in page
