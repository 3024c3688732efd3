"""explain: the numbers by hand, the risks by recipe, the command line; and the list of recipes."""

import json

import pytest
from tiny_experiment import tiny, write_experiment
from tiny_recipes import NEAREST, STOCHASTIC, base
from transformers import AutoConfig
from typer.testing import CliRunner

from nvfp4_train.cli import app
from nvfp4_train.experiment.compare import _warnings
from nvfp4_train.experiment.listing import recipe_lines, recipe_rows
from nvfp4_train.explaining.risks import risks, warnings
from nvfp4_train.explaining.summary import explain, explanation_lines
from nvfp4_train.recipe import load_recipe, recipe_names

LLAMA = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=32, tie_word_embeddings=False,
)  # fmt: skip
BLOCK = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, the MLP
HEAD = 64 * 128


def llama(**changes):
    return AutoConfig.for_model("llama", **(LLAMA | changes))


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


# The numbers


@pytest.mark.parametrize(
    "name, weight",
    [
        ("bf16", 2.0),
        ("nvidia_nvfp4", 4.5 / 8),  # 16x16: Dgrad reads Fprop's
        ("nvidia_nvfp4_1d_weights", 2 * 4.5 / 8),
        ("mxfp4", 2 * 4.25 / 8),
        ("quartet2", 4.5 / 8),  # made from Fprop's when it is needed
        ("mxfp4_tseng", 2.0),  # made from the BF16 weight of Fprop
        ("deepseek_v3_fp8", 8.25 / 8),
    ],
)
def test_bytes_a_parameter(name, weight):
    state = explain(name)["state_bytes"]
    assert sum(state["bf16"].values()) == 2 + 4 + 4 + 8
    assert state["recipe"] == {"weight": weight, "gradient": 4.0, "master": 4.0, "optimizer": 8.0}
    assert sum(state["here"].values()) == 16


def test_flops_follow_the_schedule():
    flops = explain("nvidia_nvfp4_late_fprop")["flops"]
    assert flops["fprop"] == pytest.approx({"nvfp4": 0.82, "bf16": 0.18})
    assert flops["dgrad"] == flops["wgrad"] == {"nvfp4": 1.0}
    assert explain("fp8_delayed")["flops"]["dgrad"] == {"fp8_e5m2 x fp8": 1.0}


def test_costs_of_a_model():
    model = explain("nvidia_nvfp4", llama())["model"]
    parameters = 2 * BLOCK + 2 * HEAD + 2 * 2 * 64 + 64  # blocks, embedding and head, norms
    assert model["parameters"] == parameters and model["converted_parameters"] == 2 * BLOCK
    assert model["left_in_bf16"] == ["lm_head"] and model["tokens"] == 32 and model["converted_layers"] == 14
    assert model["state_bytes"]["bf16"] == 18 * parameters
    assert model["state_bytes"]["recipe"] == 18 * parameters - (2 - 0.5625) * 2 * BLOCK
    # q, k, v read one tensor and gate, up another: BF16 keeps 4 inputs a block, a quantized layer each its own
    widths = 64 + 64 + 64 + 96
    assert model["saved_activation_bytes"]["bf16"] == 32 * 2 * (2 * widths + 64)
    packed = 3 * 64 + 64 + 2 * 64 + 96
    assert model["saved_activation_bytes"]["recipe"] == 32 * (2 * packed * 0.5625 + 2 * 64)
    attention = 3 * 2 * 2 * 64 * 16 * 2  # forward and twice backward, scores and values, half the square, two blocks
    assert model["flops_per_token"] == {"nvfp4": 6.0 * 2 * BLOCK, "bf16": 6.0 * HEAD, "attention (bf16)": attention}


def test_costs_of_the_control_and_of_kept_blocks():
    control = explain("bf16", llama())["model"]
    assert control["converted_layers"] == 0
    assert control["saved_activation_bytes"]["bf16"] == control["saved_activation_bytes"]["recipe"]
    assert set(control["flops_per_token"]) == {"bf16", "attention (bf16)"}
    kept = explain("nvidia_nvfp4_last15", llama(num_hidden_layers=4))["model"]
    assert kept["converted_parameters"] == 3 * BLOCK


def test_costs_of_experts():
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    config = AutoConfig.for_model("mixtral", **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    model = explain("nvidia_nvfp4", config, tokens=16)["model"]
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert model["converted_parameters"] == 2 * (attention + 4 * 3 * 64 * 96)  # all experts are held
    assert model["flops_per_token"]["nvfp4"] == 6.0 * 2 * (attention + 2 * 3 * 64 * 96)  # two of them work


def test_a_model_that_cannot_be():
    with pytest.raises(ValueError, match="keeps 10 blocks"):
        explain("nvidia_nvfp4_first2_last8", llama())


# The risks


def keys(recipe):
    return {risk.key: risk for risk in risks(load_recipe(recipe))}


def test_risks_of_known_recipes():
    assert keys("bf16") == {}
    full = keys("nvidia_nvfp4")
    assert set(full) == {"clamp_bias", "no_block_kept"} and not any(risk.serious for risk in full.values())
    one = keys("nvidia_nvfp4_1d_weights")["other_weight"]
    assert one.serious and "1-D blocks" in one.text and "Dgrad differentiates another weight" in one.text
    assert keys("nvidia_nvfp4_no_sr")["nearest_gradient"].where == "dgrad.grad_output, wgrad.grad_output"
    assert keys("nvidia_nvfp4_no_rht")["plain_wgrad"].where == "wgrad.grad_output, wgrad.input"
    assert "from 0.82 of training on only Dgrad" in keys("nvidia_nvfp4_late_fprop")["one_sided"].text
    assert "only Dgrad" in keys("mxfp4_tseng")["one_sided"].text and "random_signs" in keys("mxfp4_tseng")
    assert "no_block_kept" not in keys("nvidia_nvfp4_last4")
    assert "stale_scale" in keys("fp8_delayed") and "one_scale" in keys("ladder_tensor")
    assert "masked_gradient" in keys("quartet") and "twice" in keys("quartet2")
    assert "chosen_channels" in keys("tetrajet2") and "moves_weights" in keys("tetrajet2")
    assert "measured_switch" in keys("fp4_all_the_way") and "stochastic_activation" in keys("fp4_all_the_way")
    assert "no_hardware" in keys("ufp4") and "plain_wgrad" not in keys("averis")


def test_stochastic_rounding_in_forward_is_serious_and_comes_first():
    recipe = load_recipe(base(fprop={"input": STOCHASTIC, "weight": {**NEAREST, "block": "16x16"}}))
    first = risks(recipe)[0]
    assert (first.key, first.where, first.serious) == ("stochastic_forward", "fprop.input", True)
    assert warnings(recipe) == [f"fprop.input: {first.text} (2509.25149, section 4.4)"]
    assert warnings(load_recipe("nvidia_nvfp4")) == []


def test_warnings_before_an_experiment(tmp_path):
    arms = [
        {"name": "bf16", "recipe": "bf16", "control": True},
        {"name": "a", "recipe": "nvidia_nvfp4_1d_weights"},
        {"name": "b", "recipe": "nvidia_nvfp4_1d_weights"},
    ]
    told = _warnings(tiny(tmp_path, {"arms": arms}))
    assert len(told) == 1 and told[0].startswith("known risk, a, b: dgrad.weight: Dgrad differentiates another weight")


# The words and the commands


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_explains(name):
    explanation = json.loads(json.dumps(explain(name)))
    text = "\n".join(explanation_lines(explanation))
    assert name in text and "Where it may fail" in text and "None" not in text and "{" not in text
    for risk in explanation["risks"]:
        assert risk["verify"].startswith("nvfp4-train ") and risk["where"] and risk["source"]
    assert len(explanation["operands"]) == 6


def test_the_list():
    rows = {row["name"]: row for row in json.loads(json.dumps(recipe_rows()))}
    assert set(rows) == set(recipe_names())
    assert rows["mxfp4_tseng"]["four_bits"] == ["dgrad", "wgrad"] and rows["mxfp8"]["four_bits"] == []
    assert rows["nvidia_nvfp4"]["needs"][0]["instruction"] == "mxf4nvf4"
    assert "1x16" in rows["ufp4"]["needs"][0]["why_not"] and rows["ufp4"]["needs"][0]["instruction"] is None
    assert rows["tetrajet2"]["fprop"][0]["bits"] == pytest.approx(0.9 * 4.75 + 0.1 * 8.25)
    text = "\n".join(recipe_lines(list(rows.values())))
    for told in (
        "four over six in fprop/dgrad/wgrad", "emulation only", "mean apart in", "SR of the scales in",
        "once grad_to_noise is below 1.73: dgrad to bf16, wgrad to bf16", "oscillating weights are reset",
    ):  # fmt: skip
        assert told in text


def test_at_most_three_recipes_take_the_reference_path_on_a_gpu():
    slow = [row["name"] for row in recipe_rows() if any(need["reference_on_gpu"] for need in row["needs"])]
    assert len(slow) <= 3, slow


def test_the_command(tmp_path):
    experiment = write_experiment(tmp_path)
    for words in ((), ("--model", experiment)):
        done = call("explain", "nvidia_nvfp4", *words, "--json")
        assert done.exit_code == 0, done.output
        assert ("model" in json.loads(done.stdout)) == bool(words)
    assert json.loads(done.stdout)["model"]["tokens"] == 32
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    for path in (tmp_path / "config.json", tmp_path):
        done = call("explain", "mxfp4", "--model", path, "--tokens", 16)
        assert done.exit_code == 0 and "one sequence of 16 tokens" in done.stdout, done.output


@pytest.mark.parametrize(
    "words, told",
    [
        (("nvidia_nvfp5",), "did you mean 'nvidia_nvfp4'"),
        (("nvidia_nvfp4", "--model", "nowhere"), "no config.json"),
        (("nvidia_nvfp4", "--model", "broken.json"), "cannot be read"),
        (("nvidia_nvfp4_first2_last8", "--model", "tiny.yaml"), "keeps 10 blocks"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    write_experiment(tmp_path)
    done = call("explain", *words)
    assert done.exit_code == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.output
