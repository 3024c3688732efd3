"""The statistics against values worked out by hand (t quantiles from a printed table)."""

import json
import math

import pytest
from synthetic_run import BYTES_PER_TOKEN, write_run

from nvfp4_train.experiment.results import read_run
from nvfp4_train.experiment.statistics import Interval, analyze, interval, judge, seeds_needed, token_multiplier

T_975 = {1: 12.7062, 2: 4.30265, 5: 2.57058, 6: 2.44691}  # two-sided 95%, by degrees of freedom


def the_arm(run_dir, name="fp4"):
    return next(arm for arm in analyze(read_run(run_dir)).arms if arm.name == name)


def test_interval_is_students_t():
    found = interval([1.0, 2.0, 3.0])  # mean 2, sd 1
    half = T_975[2] / math.sqrt(3)
    assert (found.mean, found.n, found.sd) == (2.0, 3, 1.0)
    assert found.low == pytest.approx(2 - half, abs=1e-5)
    assert found.high == pytest.approx(2 + half, abs=1e-5)


def test_one_value_never_gives_an_interval():
    assert interval([0.7]) == Interval(0.7, 1, None, None, None)
    assert interval([]) is None


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.1, 0.2, 0.3], "inside"),  # 0.2 +- 0.25
        ([-0.1, -0.2, -0.3], "inside"),
        ([1.9, 2.0, 2.1], "outside"),  # 2.0 +- 0.25
        ([-1.9, -2.0, -2.1], "outside"),
        ([0.8, 0.9, 1.0], "cannot tell"),  # 0.9 +- 0.25: crosses +1
        ([-3.0, 0.0, 3.0], "cannot tell"),  # wider than the band on both sides
        ([0.0], "cannot tell"),  # one seed, however good it looks
        ([math.nan, 0.0], "cannot tell"),
    ],
)
def test_verdict_against_a_band_of_one_percent(values, kind):
    assert judge(interval(values), 1.0).kind == kind


def test_verdict_says_when_the_arm_is_better_and_when_nothing_is_known():
    assert "better than the control" in judge(interval([-1.9, -2.0, -2.1]), 1.0).reason
    assert judge(None, 1.0).kind == "cannot tell"
    assert judge(interval([0.1, 0.2]), None).kind == "no band"


def test_touching_the_edge_from_within_is_inside():
    assert judge(Interval(0.5, 3, 0.1, 0.0, 1.0), 1.0).kind == "inside"
    touching = judge(Interval(1.5, 3, 0.1, 1.0, 2.0), 1.0)
    assert (touching.kind, touching.seeds_needed) == ("cannot tell", 4)  # never as many as there are already


def test_seeds_needed_by_hand():
    # mean 0 and sd 1 in a band of 1: t(5)/sqrt(6) = 1.049 is too wide, t(6)/sqrt(7) = 0.925 fits.
    assert T_975[5] / math.sqrt(6) > 1 > T_975[6] / math.sqrt(7)
    assert seeds_needed(0.0, 1.0, 1.0) == 7
    assert seeds_needed(0.5, 0.5, 1.0) == 7  # half the room, half the spread
    assert seeds_needed(-0.5, 0.5, 1.0) == 7
    assert seeds_needed(2.0, 1.0, 1.0) == 7  # to be outside, the room is to the edge as well
    assert seeds_needed(0.0, 0.0, 1.0) == 2


def test_seeds_needed_on_the_edge_is_not_a_number():
    assert seeds_needed(1.0, 0.1, 1.0) is None
    assert seeds_needed(0.0, 1e9, 1.0) is None
    assert seeds_needed(0.0, math.inf, 1.0) is None
    verdict = judge(interval([0.5, 1.0, 1.5]), 1.0)
    assert (verdict.kind, verdict.seeds_needed) == ("cannot tell", None)
    assert "10,000" in verdict.reason


def test_cannot_tell_asks_for_more_seeds_than_there_are():
    verdict = judge(interval([-1.0, 0.0, 1.0]), 1.0)  # sd 1
    assert (verdict.kind, verdict.seeds_needed) == ("cannot tell", 7)
    assert "about 7 would settle it" in verdict.reason


def test_token_multiplier_interpolates_in_log_tokens():
    ratio, note = token_multiplier([100, 1000, 10_000], [4.0, 3.0, 2.0], target=2.5, spent=10_000)
    assert (ratio, note) == (pytest.approx(10**-0.5), "")  # halfway in loss: sqrt(1000 * 10000) tokens


def test_token_multiplier_ends_and_noise():
    tokens, losses = [0, 100, 1000, 10_000], [9.0, 4.0, 3.0, 2.0]  # the evaluation before training has no logarithm
    assert token_multiplier(tokens, losses, 2.0, 10_000)[0] == pytest.approx(1.0)
    assert token_multiplier(tokens, losses, 4.0, 10_000)[0] == pytest.approx(0.01)
    # 3.0 was first reached at 1000 tokens; that the curve rose again afterwards does not matter.
    assert token_multiplier([100, 1000, 2000, 10_000], [4.0, 3.0, 3.5, 2.0], 3.0, 10_000)[0] == pytest.approx(0.1)
    assert token_multiplier([100, 1000, 10_000], [4.0, 2.0, 2.5], 2.0, 10_000)[0] == pytest.approx(0.1)


def test_token_multiplier_does_not_extrapolate():
    better, note = token_multiplier([100, 1000], [4.0, 3.0], 2.9, 1000)
    assert better is None and note.startswith("above 1.00")
    worse, note = token_multiplier([100, 1000], [4.0, 3.0], 4.1, 1000)
    assert worse is None and note.startswith("below 0.10")
    assert token_multiplier([1000], [3.0], 3.0, 1000)[0] is None
    assert token_multiplier([100, 1000], [math.nan, 3.0], 3.0, 1000)[0] is None


def test_gap_in_its_three_units(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: 0.02, 2: 0.03}}, seed_offsets={0: 0.0, 1: 0.5, 2: -0.5})
    arm = the_arm(run)
    # Final control losses: 2, 3, 1. The seeds lie far apart, and the paired percentages do not see it.
    assert arm.control_losses == pytest.approx([2.0, 3.0, 1.0])
    assert arm.gaps_percent == pytest.approx([1.0, 2.0, 3.0])
    assert arm.gap_percent.sd == pytest.approx(1.0)
    assert arm.gap_nats.mean == pytest.approx((0.02 + 0.06 + 0.03) / 3)
    assert arm.gap_bits_per_byte.mean == pytest.approx((0.02 + 0.06 + 0.03) / 3 / math.log(2) / BYTES_PER_TOKEN)
    assert arm.loss_bf16_forward.mean == pytest.approx(0.998 * (2.02 + 3.06 + 1.03) / 3)
    assert arm.gap_percent_bf16_forward.mean == pytest.approx(100 * (0.998 * 1.02 - 1))
    assert (arm.spikes, arm.control_spikes) == (3, 0)


def test_multiplier_over_seeds(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.025, 1: 0.05}}, seed_offsets={0: 0.0, 1: 0.0})
    ratio = the_arm(run).multiplier.ratio
    # 0.05 and 0.10 nats above 2.0 at 0.5 nats a decade: 10^-0.1 and 10^-0.2 of the tokens; geometric mean 10^-0.15.
    # The curve is straight in log tokens, so interpolation is exact.
    assert ratio.mean == pytest.approx(10**-0.15)
    assert ratio.low == pytest.approx(10 ** (-0.15 - T_975[1] * 0.1 / math.sqrt(2) / math.sqrt(2)), rel=1e-4)


def test_one_seed_out_of_range_leaves_no_mean_multiplier(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: -0.01}}, seed_offsets={0: 0.0, 1: 0.0})
    multiplier = the_arm(run).multiplier
    assert multiplier.ratio is None
    assert "1 of 2 seeds" in multiplier.note


def test_gap_along_training(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: 0.03}}, seed_offsets={0: 0.0, 1: 0.1})
    along = the_arm(run).along
    assert [step for step, _, _ in along] == list(range(20, 201, 20))
    assert along[0][1] == 20_000
    for _, _, gap in along:
        assert gap.mean == pytest.approx(2.0)
        assert gap.high == pytest.approx(2 + T_975[1] * math.sqrt(2) / math.sqrt(2), rel=1e-4)  # sd sqrt(2), n 2


def test_along_training_keeps_to_steps_that_all_pairs_have(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: 0.03}}, seed_offsets={0: 0.0, 1: 0.0})
    metrics = run / "fp4" / "seed1" / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if '"step": 20,' not in line]
    metrics.write_text("\n".join(kept) + '\n{"kind": "eval", "st')  # and a line torn by a kill
    assert [step for step, _, _ in the_arm(run).along] == list(range(40, 201, 20))


def test_a_step_written_twice_counts_once_and_the_later_line_wins(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0})
    with open(run / "fp4" / "seed0" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "eval", "step": 200, "tokens": 200_000, "loss": 2.2, "loss_bf16_forward": None}))
    along = the_arm(run).along
    assert len(along) == 10
    assert along[-1][2].mean == pytest.approx(10.0)


def test_noise_floor_and_control_spread(tmp_path):
    run = write_run(
        tmp_path / "r",
        gaps={"fp4": {0: 0.01, 1: 0.01}, "nudged": {0: 0.003, 1: -0.004}},
        seed_offsets={0: 0.01, 1: -0.01},
        roles={"nudged": "noise_floor"},
    )
    analysis = analyze(read_run(run))
    (floor,) = analysis.noise_floors
    assert floor.rms_percent == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))
    assert floor.gap_percent.mean == pytest.approx(-0.05)
    assert analysis.control_spread_percent == pytest.approx(math.sqrt(2))  # 2.02 and 1.98 about 2.0: sd = 0.02 sqrt(2)


def test_only_pairs_that_both_finished_count(tmp_path):
    run = write_run(
        tmp_path / "r",
        gaps={"fp4": {0: 0.01, 1: 0.02, 2: 0.5, 3: 0.5}},
        seed_offsets={0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0},
        failed=(("fp4", 2),),
        missing=(("bf16", 3),),
    )
    arm = the_arm(run)
    assert arm.seeds == [0, 1]
    assert arm.gap_percent.mean == pytest.approx(1.5)
    assert set(arm.left_out) == {2, 3}
    assert "fp4 failed" in arm.left_out[2] and "bf16 missing" in arm.left_out[3]
    problems = analyze(read_run(run)).problems
    assert len(problems) == 2
    assert any("model.layers.3.mlp.down_proj.weight.grad" in text and "step 100" in text for text in problems)


def test_an_arm_without_a_pair_has_no_gap_and_no_verdict(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0}, failed=(("fp4", 0),))
    arm = the_arm(run)
    assert (arm.gap_percent, arm.seeds, arm.along, arm.multiplier.ratio) == (None, [], [], None)
    assert arm.verdict.kind == "cannot tell"


def test_a_finished_job_with_a_nan_loss_is_a_failure(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: 0.01}}, seed_offsets={0: 0.0, 1: 0.0})
    path = run / "fp4" / "seed1" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_loss": math.nan}))
    assert read_run(run).job("fp4", 1).state == "failed"
    assert the_arm(run).seeds == [0]


def test_runs_of_different_length_are_no_pair(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01, 1: 0.01}}, seed_offsets={0: 0.0, 1: 0.0})
    path = run / "fp4" / "seed1" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": 199_000}))
    assert the_arm(run).seeds == [0]
    assert any("199,000 tokens" in text for text in analyze(read_run(run)).problems)


def test_a_job_that_is_still_running_is_unfinished(tmp_path):
    run = write_run(tmp_path / "r", gaps={"fp4": {0: 0.01}}, seed_offsets={0: 0.0})
    (run / "fp4" / "seed0" / "result.json").unlink()
    job = read_run(run).job("fp4", 0)
    assert (job.state, job.why) == ("unfinished", "stopped or still running at step 200")


def test_what_is_no_run_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"no record\.json"):
        read_run(tmp_path)
    (tmp_path / "record.json").write_text('{"arms": [')
    with pytest.raises(ValueError, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "record.json").write_text('{"arms": [{"name": "a", "role": "arm"}], "seeds": [0]}')
    with pytest.raises(ValueError, match="one arm must be the control"):
        read_run(tmp_path)
