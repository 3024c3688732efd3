"""Audits along training: what is written, what raises a warning, and that training itself is not touched."""

import json
import math

import pytest
import torch
from audit_faults import microbatches, model
from safetensors.torch import load_file
from tiny_experiment import tiny

import nvfp4_train as nt
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.auditing.meters import WINDOW, OperandMeter, OperandNumbers, WeightWatch
from nvfp4_train.auditing.operands import agreement
from nvfp4_train.auditing.trends import Trends
from nvfp4_train.conversion import converted_layers
from nvfp4_train.experiment import checkpoint, monitoring
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.record import job_folder, prepare_run
from nvfp4_train.experiment.train import Job, run_job

SETTINGS = {"training.steps": 11, "evaluation.every": 5, "checkpoint.every": 6, "audit.every": 4}
CLOCK = {"tokens_per_s"}


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """(experiment, its run folder) of a tiny job that was audited every four steps."""
    folder = tmp_path_factory.mktemp("audited")
    experiment = tiny(folder, SETTINGS)
    for arm in ("bf16", "nvfp4"):
        run_job(experiment, arm, 1, folder / "out")
    return experiment, folder / "out"


def test_the_operands_of_every_audited_step_are_written(audited):
    _, out = audited
    audits = [line for line in lines_of(out / "nvfp4" / "seed1") if line["kind"] == "audit"]
    assert [line["step"] for line in audits] == [0, 4, 8]
    assert 17 < audits[0]["fprop.input/sqnr_db"] < 23 and 15 < audits[0]["wgrad.grad_output/sqnr_db"] < 20
    assert audits[0]["grad_to_noise"] > math.sqrt(3)
    assert len(audits[0]["layers"]) == 14 and len(audits[0]["layers"]["model.layers.0.mlp.up_proj"]) == 5
    (weights,) = [line for line in lines_of(out / "nvfp4" / "seed1") if line["kind"] == "audit_weights"]
    assert weights["step"] == WINDOW and 0 <= weights["oscillating"] <= weights["worst"] < 0.5
    assert not any(line["kind"].startswith("audit") for line in lines_of(out / "bf16" / "seed1"))


def test_training_is_bitwise_the_same_with_audits(audited, tmp_path):
    _, out = audited
    plain = tiny(tmp_path, SETTINGS | {"audit.every": None, "audit": None})
    run_job(plain, "nvfp4", 1, tmp_path / "out")

    def weights(folder):
        return load_file(checkpoint.latest(folder / "nvfp4" / "seed1" / "checkpoint") / "model.safetensors")

    first, second = weights(out), weights(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_nothing_is_installed_where_no_audit_is_asked_for(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("an observer was installed")

    monkeypatch.setattr(ledger, "observing", never)
    monkeypatch.setattr(monitoring, "Monitor", never)
    experiment = tiny(tmp_path, {"training.steps": 2, "evaluation.every": 2})
    run_job(experiment, "nvfp4", 1, tmp_path / "out")


def test_nothing_is_installed_between_audits(tmp_path, monkeypatch):
    experiment = tiny(tmp_path, {"training.steps": 5, "evaluation.every": 5, "audit.every": 4})
    whole, seen = ledger.observing, []
    monkeypatch.setattr(ledger, "observing", lambda observer: seen.append(job.step) or whole(observer))
    out = tmp_path / "out"
    job = Job(experiment, "nvfp4", 1, job_folder(out, "nvfp4", 1), prepare_run(experiment, out))
    job.run()
    assert seen == [0, 4]


def test_a_resumed_job_writes_the_lines_of_one_that_never_stopped(audited, tmp_path, monkeypatch):
    experiment, out = audited
    again = tiny(tmp_path, SETTINGS)
    folder = job_folder(tmp_path / "out", "nvfp4", 1)
    run_job(again, "bf16", 1, tmp_path / "out")
    corpus, whole = prepare_run(again, tmp_path / "out"), Job._step

    def until_seven(job):  # the checkpoint of step 6 lies in the window that began at step 0
        if job.step == 7:
            raise KeyboardInterrupt
        whole(job)

    monkeypatch.setattr(Job, "_step", until_seven)
    with pytest.raises(KeyboardInterrupt):
        Job(again, "nvfp4", 1, folder, corpus).run()
    monkeypatch.undo()
    Job(again, "nvfp4", 1, folder, corpus).run()
    assert lines_of(folder) == lines_of(out / "nvfp4" / "seed1")


def test_a_section_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="audit.every"):
        tiny(tmp_path, {"audit.every": 0})


def test_the_meter_agrees_with_the_audit():
    net = model("nvidia_nvfp4")
    meter, events = OperandMeter(), []
    collect = type("Collect", (), {"quantized": lambda self, e: events.append(e), "multiplied": lambda self, e: None})()
    with ledger.observing(meter), ledger.observing(collect):
        microbatches(net)[0]().backward()
    numbers = meter.numbers()
    assert len(numbers) == 4 * 5
    for event in events:
        if event.made.operand is None:
            continue
        scheme = Scheme.parse(event.scheme)
        exact = agreement(event.source.detach(), event.transposed, event.made.operand, scheme)
        row = numbers[event.layer, event.operand]
        assert row.sqnr_db == pytest.approx(-10 * math.log10(exact.noise), abs=0.2)
        assert row.underflow == pytest.approx(exact.underflow, abs=0.005)
        assert row.amax == pytest.approx(exact.amax, rel=1e-6)


def test_scales_that_underflow_are_seen():
    x = torch.randn(16, 64)
    x[:, :16] *= 1e-8  # below the least E4M3 scale under this amax
    meter = OperandMeter()
    layer = nt.QuantizedLinear(64, 16, label="layer")
    with ledger.observing(meter), torch.no_grad():
        layer(x)
    row = meter.numbers()["layer", "fprop.input"]
    assert row.scale_underflow == 0.25 and row.underflow > 0.25


def test_weights_that_flip_while_they_stand_still_are_found():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    with torch.no_grad():  # half of each block on the threshold between codes 2 and 3, the block's amax fixed
        weight = net[0].weight
        weight[:] = 6.0
        weight[:, ::2] = 2.5
    nt.convert(net, "nvidia_nvfp4")
    layer = converted_layers(net)["0"]
    watch = WeightWatch({"0": layer})
    for step in range(WINDOW):
        with torch.no_grad():
            layer.weight[:, ::2] = 2.5 + (1e-3 if step % 2 else -1e-3)
        over = watch.after_step()
    assert over and watch.shares() == {"0": 0.5}
    still = WeightWatch({"0": layer})
    for _ in range(WINDOW):
        still.after_step()
    assert still.shares() == {"0": 0.0}


def row(**changes):
    return OperandNumbers(20.0, 0.1, 0.03, 0.0, 1.0, 4.0)._replace(**changes)


def test_trends_warn_of_what_rises_and_only_then():
    trends = Trends()
    calm = {("a", "fprop.input"): row(), ("b", "fprop.input"): row()}
    assert [list(trends.operands(calm)) for _ in range(3)] == [[], [], []]
    rising = {key: row(underflow=0.2) for key in calm}
    ((check, text),) = trends.operands(rising)
    assert check == "underflow" and "20.0%" in text and "10.0% before" in text
    ((check, text),) = trends.operands(calm | {("b", "fprop.input"): row(amax=9.0)})
    assert check == "amax" and text.startswith("b: fprop.input: amax is 9.0 times")


def test_the_noise_threshold_oscillation_and_the_gap_warn():
    trends = Trends()
    assert not list(trends.noise(1.8)) and not list(trends.noise(None))
    assert next(trends.noise(1.7))[0] == "gradient_noise"
    assert not list(trends.oscillation({"a": 0.01}))
    assert "b: 5.0%" in next(trends.oscillation({"a": 0.01, "b": 0.05}))[1]
    steps = [(1, 0.001), (2, 0.004), (3, 0.009), (4, 0.008)]
    found = [list(trends.gap(step, gap, 0.002)) for step, gap in steps]
    assert [len(each) for each in found] == [0, 0, 1, 0] and found[2][0][0] == "gap"
    quiet = Trends()
    assert not any(list(quiet.gap(step, gap, None)) for step, gap in steps)


def test_a_gap_is_taken_to_the_control_of_the_same_step_and_judged_by_the_noise_floor(tmp_path):
    def write(arm, losses):
        folder = tmp_path / arm / "seed1"
        folder.mkdir(parents=True)
        lines = [{"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    write("bf16", {10: 4.0, 20: 3.0, 30: 2.0})
    write("chaos", {10: 4.004, 20: 3.003, 30: 2.002})
    folder = write("mine", {})
    told = []
    monitor = monitoring.Monitor(model("nvidia_nvfp4"), 10, folder, "bf16", "chaos", lambda **k: told.append(k), print)
    for step, loss in ((10, 4.008), (20, 3.03), (30, 2.1), (40, 9.9)):
        monitor.after_evaluation(step, loss)
    (warning,) = told
    assert warning["check"] == "gap" and "+5.00%" in warning["text"] and "0.10%" in warning["text"]
