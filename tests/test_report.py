"""The report: what it says, that it says failures aloud, and that nothing in it can leave the page."""

import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from synthetic_run import write_run

from nvfp4_train.experiment.report import render, summary, summary_table
from nvfp4_train.experiment.results import read_run
from nvfp4_train.experiment.statistics import Interval
from nvfp4_train.experiment.wording import interval_text, percent

VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Text and tags of a page; fails if a tag is closed that was not the last one opened."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.sources = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(path):
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    return page, re.sub(r"\s+", " ", " ".join(page.text))


def table_text(run, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(summary_table(summary(run)))
    return console.export_text()


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Three seeds, one recipe, a noise floor: 1.5% +- 0.25% against a band of 1%."""
    return write_run(
        tmp_path_factory.mktemp("usual") / "r",
        gaps={"fp4": {0: 0.014, 1: 0.015, 2: 0.016}, "nudged": {0: 0.001, 1: -0.001, 2: 0.001}},
        seed_offsets={0: 0.0, 1: 0.004, 2: -0.004},
        roles={"nudged": "noise_floor"},
    )


@pytest.fixture(scope="module")
def rendered(usual):
    return render(usual)


def test_page_says_the_verdict_and_carries_everything(usual, rendered):
    path = rendered
    page, text = read(path)
    assert path == usual / "report.html"
    assert (
        "fp4 ends 1.50% above BF16 (95% interval +1.25 to +1.75%, 3 seeds). "
        "Outside the band: the whole interval lies above +1%." in text
    )
    assert "one such run ends ±0.1% away from its control" in text
    assert "From seed to seed the control itself varies by ±0.4%" in text
    assert "Not everything finished" not in text
    for fact in ("ab" * 32, "2.13.0", "two cores", "rounding: stochastic", "12 converted, 2 left in high precision"):
        assert fact in text
    for fact in ("keep_bf16.modules names it (lm_head)", "nvfp4 x nvfp4", "28.0%", "equivalence: {percent: 1.0}", "20"):
        assert fact in text
    assert page.tags.count("img") == 4
    assert sorted(p.name for p in usual.glob("*.png")) == ["final_gap.png", "formats.png", "gap.png", "loss.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in usual.glob("*.png"))
    assert not list(usual.glob("*.part"))


def test_page_fetches_nothing(rendered):
    page, _ = read(rendered)
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in rendered.read_text() and "@import" not in rendered.read_text()


def test_page_is_made_for_phone_and_paper(rendered):
    html = rendered.read_text()
    assert 'name="viewport"' in html and "@media print" in html and 'class="scroll"' in html


def test_everything_from_outside_is_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    run = write_run(
        tmp_path / "r",
        gaps={evil: {0: 0.01, 1: 0.02}},
        seed_offsets={0: 0.0, 1: 0.0},
        failed=((evil, 1),),
        record={
            "name": "</title><script>alert(1)</script>",
            "question": "a < b & c > d?",
            "yaml": "</pre><b>out</b>",
            "hardware": {"<i>": "<u>"},
        },
    )
    page, text = read(render(run))
    assert not {"script", "b>out", "i", "u"} & set(page.tags)
    assert page.sources == [source for source in page.sources if source.startswith("data:")]
    assert "a < b & c > d?" in text and "</pre><b>out</b>" in text and f"{evil}, seed 1: failed" in text


def test_names_that_matplotlib_would_read_as_formulas(tmp_path):
    run = write_run(tmp_path / "r", gaps={r"_$\frac$": {0: 0.01}}, seed_offsets={0: 0.0})
    assert render(run).is_file()


def test_failures_are_said_aloud(tmp_path):
    run = write_run(
        tmp_path / "r",
        gaps={"fp4": {0: 0.01, 1: 0.01, 2: 0.01}, "mxfp4": {0: 0.03, 1: 0.03, 2: 0.03}},
        seed_offsets={0: 0.0, 1: 0.0, 2: 0.0},
        failed=(("mxfp4", 0), ("mxfp4", 1), ("mxfp4", 2)),
        missing=(("fp4", 2),),
    )
    _, text = read(render(run))
    assert "Not everything finished." in text
    assert "fp4, seed 2: missing (never started)." in text
    assert "mxfp4, seed 1: failed (stopped at step 100: model.layers.3.mlp.down_proj.weight.grad was not finite" in text
    assert "has no gap to report. Cannot tell: no seed has both this arm and the control finished." in text
    assert len(summary(run)["problems"]) == 4
    assert "fp4, seed 2: missing" in table_text(run)


def test_a_failure_told_as_a_sentence_is_not_ended_twice(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0}, failed=(("fp4", 0),))
    path = run / "fp4" / "seed0" / "result.json"
    result = json.loads(path.read_text())
    result["failure"]["tensor"] = "the weight lm_head.weight is not finite"
    path.write_text(json.dumps(result))
    assert ": the weight lm_head.weight is not finite; last good" in read_run(run).job("fp4", 0).why


def test_the_last_loss_of_a_failed_job_is_not_shown_as_a_result(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0}, failed=(("fp4", 0),))
    path = run / "fp4" / "seed0" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_loss": 7.6543}))
    assert "7.6543" not in read(render(run))[1]


def test_one_seed_shows_no_interval_anywhere(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.012}}, seed_offsets={0: 0.0})
    _, text = read(render(run))
    assert "fp4 ends 1.20% above BF16 (one seed, so no interval). Cannot tell: one seed says nothing" in text
    assert "one seed, so there is no interval" in text
    assert not re.search(r"\d to [+−]?\d", text)
    gap = summary(run)["arms"][0]["gap_percent"]
    assert (gap["n"], gap["sd"], gap["low"], gap["high"]) == (1, None, None, None)


def test_nothing_finished_still_gives_a_page(tmp_path):
    run = write_run(
        tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0}, missing=(("fp4", 0), ("bf16", 0)), band=None
    )
    _, text = read(render(run))
    assert "bf16, seed 0: missing (never started)." in text
    assert "Not judged" in text
    assert "–" in table_text(run)


def test_a_sparse_record_still_gives_a_page(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0})
    record = json.loads((run / "record.json").read_text())
    keep = {key: record[key] for key in ("name", "arms", "seeds")}
    (run / "record.json").write_text(json.dumps(keep))
    _, text = read(render(run))
    assert "fp4 ends 1.00% above BF16" in text


def test_several_recipes_are_counted_in_the_headline(tmp_path):
    gaps = {"good": 0.001, "bad": 0.05, "late": 0.002}
    run = write_run(
        tmp_path / "r",
        gaps={arm: {seed: gap + 0.0001 * seed for seed in (0, 1, 2)} for arm, gap in gaps.items()},
        seed_offsets={0: 0.0, 1: 0.0, 2: 0.0},
    )
    headline = "Of 3 recipes held against the equivalence band of ±1%: 2 inside, 1 outside."
    assert summary(run)["verdict"] == headline
    assert headline in read(render(run))[1]


def test_a_gap_below_the_noise_floor_is_said_to_be(tmp_path):
    run = write_run(
        tmp_path / "r",
        gaps={"fp4": {0: 0.001, 1: 0.0012}, "nudged": {0: 0.005, 1: -0.005}},
        seed_offsets={0: 0.0, 1: 0.0},
        roles={"nudged": "noise_floor"},
    )
    assert "smaller than the noise floor of one run (±0.5%)" in summary(run)["verdict"]


def test_summary_is_json_and_agrees_with_the_table(usual):
    found = json.loads(json.dumps(summary(usual), allow_nan=False))
    assert found["band_percent"] == 1.0 and found["control"]["name"] == "bf16"
    arm, floor = found["arms"]
    assert arm["gap_percent"]["mean"] == pytest.approx(1.5)
    assert (arm["verdict"]["kind"], arm["seeds"], floor["role"]) == ("outside", [0, 1, 2], "noise_floor")
    assert arm["along"][-1]["step"] == 200
    row = next(line for line in table_text(usual).splitlines() if "fp4" in line)
    assert "+1.50" in row and "+1.25 to +1.75" in row and "outside" in row


def test_markup_in_names_is_not_markup_in_the_table(tmp_path):
    run = write_run(tmp_path / "r", gaps={"[red]x[-red]": {0: 0.01}}, seed_offsets={0: 0.0})
    assert "[red]x[-red]" in table_text(run)


@pytest.mark.parametrize(
    ("gap", "mean", "span"),
    [
        (Interval(1.23456, 3, 0.1, 0.98, 1.48), "+1.23%", "+0.98 to +1.48"),
        (Interval(-0.00123, 5, 0.1, -0.00423, 0.00177), "−0.001%", "−0.004 to +0.002"),
        (Interval(12.3, 1), "+12.30%", ""),
        (Interval(-0.0001, 1), "0.00%", ""),
        (Interval(float("nan"), 2, float("nan"), float("nan"), float("nan")), "–", ""),
        (None, "–", ""),
    ],
)
def test_digits(gap, mean, span):
    assert (percent(gap), interval_text(gap)) == (mean, span)


def test_rendering_twice_gives_the_same_bytes(usual, rendered):
    before = rendered.read_bytes()
    assert render(usual).read_bytes() == before
