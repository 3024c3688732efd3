"""The experiment file: every fault is told at once, by key path, with the remedy; nothing is guessed."""

import pytest
from tiny_experiment import TINY, tiny, write_experiment

from nvfp4_train.experiment.config import NOISE_FLOOR, load_experiment
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.model import learning_rate, resolve_config

FAULTS = [
    ({"training.learning_rat": 1.0}, ["training.learning_rat", "did you mean 'learning_rate'"]),
    ({"training.schedule": "cosin"}, ["training.schedule", "did you mean 'cosine'"]),
    ({"training.schedule": "wsd"}, ["decay_fraction", "wsd"]),
    ({"training.decay_fraction": 0.2}, ["decay_fraction", "wsd"]),
    ({"training.tokens": 4096}, ["steps", "tokens"]),
    ({"training.warmup": 100}, ["training.warmup", "less than or equal to 1"]),
    ({"training.batch_size": 0}, ["training.batch_size", "greater than or equal to 1"]),
    ({"training.batch_size": None}, ["training.batch_size", "missing"]),
    ({"training.device": "gpu"}, ["training.device", "'gpu'", "cpu or cuda"]),
    ({"model.checkpoint": "folder"}, ["model", "'config'", "'checkpoint'"]),
    ({"model.config.model_type": None}, ["model", "model_type"]),
    ({"model.config.model_type": ["llama"]}, ["model", "model_type, a name"]),
    ({"data.source": "stdlib"}, ["exactly one of", "source, files"]),
    ({"data.files": None}, ["exactly one of", "none of them"]),
    ({"data.end_of_document": "<eos>"}, ["end_of_document", "tokenizer.json"]),
    ({"data.bytes_per_token": 3.5}, ["bytes_per_token", "shards"]),
    ({"data.held_out": 1.5}, ["data.held_out"]),
    ({"data.files": None, "data.shards": ["*.bin"]}, ["leave out 'tokenizer'"]),
    ({"data.files": None, "data.dataset": {"path": "x", "streaming": True}}, ["data.dataset", "documents"]),
    ({"seeds": []}, ["seeds"]),
    ({"seeds": [1, 1]}, ["a seed is listed twice"]),
    ({"arms": TINY["arms"][1:]}, ["exactly one arm must say control: true"]),
    ({"arms": [TINY["arms"][0], TINY["arms"][0]]}, ["'bf16' is used twice", "found 2"]),
    ({"arms": [{"name": "a/b", "recipe": "bf16", "control": True}]}, ["arms[0].name"]),
    ({"arms": [{"name": "a", "recipe": "nvidia_nvfp4", "control": True}]}, ["'a' is the control", "must be bf16"]),
    ({"arms": [TINY["arms"][0], {"name": "b", "recipe": "nvidia_nvfp"}]}, ["arms.b.recipe", "did you mean"]),
    ({"arms": [TINY["arms"][0], {"name": "b", "recipe": "my/own.yaml"}]}, ["arms.b.recipe", "own.yaml"]),
    *(({"arms": [TINY["arms"][0], {"name": name, "recipe": "bf16"}]}, [f"'{name}' is taken"])
      for name in ("data", "record.json", "experiment.yaml", "Report.html", "loss.png")),
    ({"arms": [{**TINY["arms"][0], "control": "yes"}]}, ["arms[0].control", "valid boolean"]),
    ({"seeds": [True]}, ["seeds[0]", "valid integer"]),
    ({"seeds": ["1"]}, ["seeds[0]", "valid integer"]),
    ({"training.steps": True}, ["training.steps", "expected a number, got true"]),
    ({"training.learning_rate": True}, ["training.learning_rate", "expected a number, got true"]),
    ({"noise_floor": 1}, ["noise_floor", "valid boolean"]),
    ({"equivalence": None}, ["equivalence", "missing"]),
    ({"tracking": {"wandb": {"mode": "ofline"}}}, ["tracking.wandb.mode", "did you mean 'offline'"]),
]  # fmt: skip


@pytest.mark.parametrize("changes, told", FAULTS, ids=[",".join(map(str, f[0])) for f in FAULTS])
def test_a_fault_is_named(tmp_path, changes, told):
    path = write_experiment(tmp_path, changes, text=False)
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert str(path) in str(caught.value)
    for part in told:
        assert part in str(caught.value)


def test_all_faults_are_told_at_once_with_their_lines(tmp_path):
    path = write_experiment(tmp_path, {"training.clipp": 1, "seeds": ["x"], "evaluation.every": 0}, text=False)
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    for part in ("3 faults", "training.clipp", "seeds[0]", "evaluation.every", "line "):
        assert part in str(caught.value)


def test_a_key_written_twice_is_refused(tmp_path):
    path = write_experiment(tmp_path, text=False)
    path.write_text(path.read_text() + "name: another\n")
    with pytest.raises(ExperimentError, match="name.*twice"):
        load_experiment(path)


@pytest.mark.parametrize("text, told", [("a: [1", "not valid YAML"), ("", "empty"), ("- 1", "key: value")])
def test_broken_yaml(tmp_path, text, told):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ExperimentError, match=told):
        load_experiment(path)


def test_a_missing_file_names_the_nearest(tmp_path):
    write_experiment(tmp_path, text=False)
    with pytest.raises(ExperimentError, match="did you mean .*tiny.yaml"):
        load_experiment(tmp_path / "tinny.yaml")


def test_the_noise_floor_is_an_arm_beside_its_control(tmp_path):
    arms = tiny(tmp_path, {"noise_floor": True}).all_arms
    assert [(arm.name, arm.role, arm.recipe.name) for arm in arms] == [
        ("bf16", "control", "bf16"), (NOISE_FLOOR, "noise_floor", "bf16"), ("nvfp4", "arm", "nvidia_nvfp4")
    ]  # fmt: skip


def test_a_budget_of_tokens_is_rounded_to_steps(tmp_path):
    experiment = tiny(tmp_path, {"training.steps": None, "training.tokens": 1000, "training.accumulation": 3})
    assert experiment.tokens_per_step == 2 * 3 * 32
    assert experiment.total_steps == 5


@pytest.mark.parametrize(
    "changes, rates",
    [
        ({}, [0.5, 1.0, 1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        ({"training.schedule": "wsd", "training.decay_fraction": 0.5}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"training.warmup": 0.0, "training.decay_to": 1.0}, [1.0] * 8),
    ],
)
def test_learning_rates(tmp_path, changes, rates):
    experiment = tiny(tmp_path, changes)
    peak = experiment.training.learning_rate
    arm = experiment.arm("nvfp4")
    assert [learning_rate(experiment, arm, step) / peak for step in range(8)] == pytest.approx(rates)


def test_an_arm_may_have_a_learning_rate_of_its_own(tmp_path):
    same = tiny(tmp_path)
    arms = same.resolved()["arms"]
    arms[1]["learning_rate"] = 2 * same.training.learning_rate
    other = tiny(tmp_path, {"arms": arms})
    assert other.digest() == same.digest()  # the control may be shared; the arm is another
    assert other.arm("bf16").text == same.arm("bf16").text and other.arm("nvfp4").text != same.arm("nvfp4").text
    for arm, factor in (("bf16", 1.0), ("nvfp4", 2.0)):
        rates = [learning_rate(e, e.arm(arm), 5) for e in (other, same)]
        assert rates[0] == factor * rates[1]


def test_what_may_change_between_two_calls_is_not_part_of_the_identity(tmp_path):
    first = tiny(tmp_path).digest()
    same = {"seeds": [1, 2], "jobs": 2, "question": "another?", "checkpoint.every": 5, "noise_floor": True}
    assert tiny(tmp_path, same).digest() == first
    for change in ({"training.learning_rate": 1e-3}, {"equivalence.percent": 1.0}, {"data.held_out": 0.2}):
        assert tiny(tmp_path, change).digest() != first


NEOX = {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config, arrived",
    [
        ({"model_type": "llama", "rope_theta": 12345.0}, {"rope_theta": 12345.0}),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}),
        ({"model_type": "llama", "rope_scaling": None, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
          "transformers_version": "4.30.0"}, {"rope_theta": 10000.0}),
        ({**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 777}, {"partial_rotary_factor": 0.5, "rope_theta": 777}),
    ],
)  # fmt: skip
def test_keys_of_older_config_files_act(tmp_path, config, arrived):
    experiment = tiny(tmp_path, {"model.config": config})
    before = experiment.digest()
    found = resolve_config(experiment, 256).rope_parameters
    assert {key: found[key] for key in arrived} == arrived
    assert experiment.digest() == before  # transformers has not written into the experiment


@pytest.mark.parametrize(
    "config, told",
    [
        ({"model_type": "gpt2", "rope_theta": 5.0}, "does not know 'rope_theta'"),
        ({"model_type": "llama", "rotary_emb_base": 777}, "rotary_emb_base: a llama config ignores it"),
    ],
)
def test_keys_that_would_not_act_are_refused(tmp_path, config, told):
    with pytest.raises(ExperimentError, match=told):
        resolve_config(tiny(tmp_path, {"model.config": config}), 256)
