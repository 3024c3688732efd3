"""compare: runs what is missing, survives what fails, refuses what is another's, and takes its jobs with it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from tiny_experiment import tiny, write_experiment

from nvfp4_train.experiment import tracking
from nvfp4_train.experiment.compare import JobState, _jobs, compare
from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.progress import Display
from nvfp4_train.experiment.record import job_folder, prepare_run
from nvfp4_train.experiment.shares import format_name, matmul_shares
from nvfp4_train.experiment.tracking import MetricsReader
from nvfp4_train.experiment.train import read_result
from nvfp4_train.recipe import load_recipe


def quiet(folder):
    return Console(file=open(folder / "said.txt", "a"), width=200)


def said(folder):
    return (folder / "said.txt").read_text()


def test_a_whole_comparison_with_one_broken_job_and_then_repaired(tmp_path):
    experiment, out = tiny(tmp_path, {"jobs": 2}), tmp_path / "out"
    broken = job_folder(out, "nvfp4", 1) / "checkpoint" / "step_00000003"
    prepare_run(experiment, out)
    broken.mkdir(parents=True)
    (broken / "checkpoint.json").write_text("{}")
    jobs = {job.arm: job for job in compare(experiment, out, quiet(tmp_path))}
    assert (jobs["bf16"].status, jobs["nvfp4"].status) == ("finished", "failed")
    assert jobs["nvfp4"].exit_code == 2 and "delete it to begin anew" in jobs["nvfp4"].message
    assert "nvfp4 seed 1: FAILED" in said(tmp_path)

    first = json.loads((job_folder(out, "bf16", 1) / "result.json").read_text())
    (broken / "checkpoint.json").unlink()
    broken.rmdir()
    jobs = {job.arm: job for job in compare(experiment, out, quiet(tmp_path))}
    assert [job.status for job in jobs.values()] == ["finished", "finished"]
    assert json.loads((job_folder(out, "bf16", 1) / "result.json").read_text()) == first  # not run again
    assert "1 of 2 jobs are done already" in said(tmp_path) and "gap " in said(tmp_path)

    record = json.loads((out / "record.json").read_text())
    assert (out / "experiment.yaml").read_text() == record["yaml"] == experiment.text
    assert len(record["conversion"]["nvfp4"]["converted"]) == 14 and not record["conversion"]["bf16"]["converted"]
    assert [s["name"] for s in record["conversion"]["nvfp4"]["skipped"]] == ["lm_head"]
    assert [(a["name"], a["role"]) for a in record["arms"]] == [("bf16", "control"), ("nvfp4", "arm")]
    for arm in ("bf16", "nvfp4"):
        assert sum(row["share"] for row in record["flops"][arm]) == pytest.approx(1.0)

    two_seeds = tiny(tmp_path, {"jobs": 1, "seeds": [1, 2]})  # pair by pair: a run cut by time has whole pairs
    jobs = compare(two_seeds, out, quiet(tmp_path))
    assert [(job.seed, job.arm) for job in jobs] == [(1, "bf16"), (1, "nvfp4"), (2, "bf16"), (2, "nvfp4")]


def test_shares_of_flops_are_those_of_the_whole_step(tmp_path):
    """Against a count by hand: blocks, head, attention, each GEMM three times the forward's."""
    from nvfp4_train.conversion import convert
    from nvfp4_train.experiment.data import load_corpus
    from nvfp4_train.experiment.model import build_model

    experiment = tiny(tmp_path)
    window = load_corpus(experiment, tmp_path / "out").held_out_batches(1, 1)[0]
    tokens, hidden, wide, vocab, layers = 32, 32, 48, 256, 2
    blocks = 2 * tokens * layers * (4 * hidden * hidden + 3 * hidden * wide)
    head, attention = 2 * tokens * hidden * vocab, layers * 2 * (2 * tokens * tokens * hidden)
    total = 3 * (blocks + head + attention)
    for name, fp4 in {"bf16": 0.0, "nvidia_nvfp4": 1.0, "nvidia_nvfp4_late_fprop": 0.82}.items():
        recipe = load_recipe(name)
        model = build_model(experiment, 1, 256)
        convert(model, recipe)
        rows = {(row["gemm"], row["format"]): row["share"] for row in matmul_shares(model, window, recipe)}
        assert rows.get(("fprop", "nvfp4 x nvfp4"), 0.0) == pytest.approx(fp4 * blocks / total)
        assert rows["fprop", "bf16 x bf16"] == pytest.approx(((1 - fp4) * blocks + head) / total)
        backward = rows.get(("wgrad", "nvfp4 x nvfp4"), 0.0) + rows["wgrad", "bf16 x bf16"]
        assert backward == pytest.approx((blocks + head) / total)
        assert rows["attention", "bf16 x bf16"] == pytest.approx(3 * attention / total)
    assert format_name(str(load_recipe("mxfp4").fprop.input.scheme)) == "mxfp4"


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"training.learning_rate": 0.01}, "training.learning_rate is 0.003 there and 0.01 here"),
        ({"name": "other"}, "name is 'tiny' there and 'other' here"),
        ({"equivalence.percent": 9.0}, "equivalence.percent"),
        ({"arms": [{"name": "bf16", "recipe": "bf16", "control": True}]}, "arm 'nvfp4' that the experiment no longer"),
        (
            {"arms": [{"name": "bf16", "recipe": "bf16", "control": True}, {"name": "nvfp4", "recipe": "mxfp4"}]},
            "arm 'nvfp4' was made with another recipe",
        ),
        ({"seeds": [2]}, "may not be left out"),
    ],
)
def test_a_folder_of_another_experiment_is_refused_untouched(tmp_path, changes, told):
    out = tmp_path / "out"
    prepare_run(tiny(tmp_path), out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ExperimentError, match=told):
        prepare_run(tiny(tmp_path, changes), out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_leftovers_of_a_kill_while_the_record_was_written(tmp_path):
    experiment, out = tiny(tmp_path), tmp_path / "out"
    prepare_run(experiment, out)
    (out / "record.json").rename(out / "record.json.123")
    (out / "data.x1y2").mkdir()
    prepare_run(experiment, out)
    assert (out / "record.json").is_file()


def test_a_folder_whose_text_has_changed_is_refused(tmp_path):
    experiment, out = tiny(tmp_path), tmp_path / "out"
    prepare_run(experiment, out)
    shutil.rmtree(out / "data")
    prepare_run(experiment, out)  # made anew from the same text
    shutil.rmtree(out / "data")
    (tmp_path / "text" / "00.txt").write_text("another text")
    with pytest.raises(ExperimentError, match="was run on another text"):
        prepare_run(experiment, out)


def test_a_damaged_result_is_told(tmp_path):
    experiment, out = tiny(tmp_path), tmp_path / "out"
    folder = job_folder(out, "bf16", 1)
    folder.mkdir(parents=True)
    for text in ("", "[]", "{}"):
        (folder / "result.json").write_text(text)
        with pytest.raises(ExperimentError, match="result.json is damaged"):
            read_result(folder)
        with pytest.raises(ExperimentError, match="result.json is damaged"):
            _jobs(experiment, out)


def test_seeds_and_arms_may_be_added(tmp_path):
    out = tmp_path / "out"
    prepare_run(tiny(tmp_path), out)
    more = tiny(tmp_path, {"seeds": [1, 5], "noise_floor": True, "question": "and now?"})
    prepare_run(more, out)
    record = json.loads((out / "record.json").read_text())
    assert record["seeds"] == [1, 5]
    assert [arm["role"] for arm in record["arms"]] == ["control", "noise_floor", "arm"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopping_compare_stops_its_jobs(tmp_path, number):
    path = write_experiment(tmp_path, {"training.steps": 10**6, "jobs": 1, "checkpoint.every": 5})
    out = tmp_path / "out"
    command = [sys.executable, "-m", "nvfp4_train.cli", "compare", str(path), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    checkpoints = job_folder(out, "bf16", 1) / "checkpoint"
    limit = time.monotonic() + 120
    while not list(checkpoints.glob("step_*")) and time.monotonic() < limit:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130 and b"goes on from the last checkpoint" in errors
        assert b"Traceback" not in errors
    limit = time.monotonic() + 30
    while running_in(out) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not running_in(out)


def running_in(out):
    """Processes that have this folder on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{entry}/stat") as file:
                zombie = file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        if str(out).encode() in command and not zombie and entry.isdigit() and int(entry) != os.getpid():
            found.append(entry)
    return found


def test_the_reader_gives_whole_lines_once_and_follows_a_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert list(reader.new_lines()) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in reader.new_lines()] == [1, 2]
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert [line["step"] for line in reader.new_lines()] == [3]
    path.write_text('{"step": 1}\n')
    assert [line["step"] for line in reader.new_lines()] == [1]


def test_the_gap_so_far_is_taken_at_the_last_shared_evaluation(tmp_path):
    experiment = tiny(tmp_path)
    jobs = [
        JobState(arm, role, seed, tmp_path, MetricsReader(tmp_path / "none"))
        for arm, role in (("bf16", "control"), ("nvfp4", "arm"))
        for seed in (1, 2)
    ]
    jobs[0].evaluations, jobs[2].evaluations = {4: 3.0, 8: 2.0}, {4: 3.3, 8: 2.1, 12: 9.0}
    with Display(quiet(tmp_path), experiment, jobs) as display:
        assert display.gap(jobs[2]) == pytest.approx(5.0)
        assert display.gap(jobs[0]) is None and display.gap(jobs[3]) is None


def test_bars_on_a_terminal_show_loss_pace_gap_and_time(tmp_path):
    experiment = tiny(tmp_path)
    console = Console(file=open(tmp_path / "said.txt", "w"), force_terminal=True, width=150)
    control = JobState("bf16", "control", 1, tmp_path, MetricsReader(tmp_path / "x"), evaluations={4: 2.0})
    job = JobState("nvfp4", "arm", 1, tmp_path, MetricsReader(tmp_path / "x"), evaluations={4: 2.1})
    with Display(console, experiment, [control, job]) as display:
        job.status, job.step, job.loss, job.tokens_per_s = "running", 4, 2.345, 64.0
        display.started(job)
        display.refresh()
        display._bars.refresh()
    for part in ("nvfp4 seed 1", "4/8", "loss 2.345", "64 tokens/s", "gap +5.00%", "0:04 left"):
        assert part in said(tmp_path)


def test_wandb_online_without_a_login_fails_before_training(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "api", type("Api", (), {"api_key": None})())
    experiment = tiny(tmp_path, {"tracking": {"wandb": {"mode": "online"}}})
    with pytest.raises(ExperimentError, match="wandb login"):
        compare(experiment, tmp_path / "out", quiet(tmp_path))
    assert not (tmp_path / "out").exists()


def test_wandb_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExperimentError, match="pip install"):
        tracking.check_wandb(tiny(tmp_path, {"tracking": {"wandb": {}}}))
    tracking.check_wandb(load_experiment(write_experiment(tmp_path)))  # and nobody needs it who does not ask for it
