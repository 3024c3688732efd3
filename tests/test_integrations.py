"""The trainers people already use: conversion by one line, the schedule inside their loop, resuming to the same bits.

They are no dependencies: each test skips where its trainer is not installed.
"""

import logging
import warnings

import pytest
import torch
from torch import nn

import nvfp4_train as nt
from nvfp4_train.conversion import converted_layers

torch.set_num_threads(1)
LATE = "nvidia_nvfp4_late_fprop"  # Fprop in BF16 from 82% on
# nothing is drawn; what moved at all in steps 2 to 5 of 7 is set to its quantized value after step 5
RESETS = nt.load_recipe("nvidia_nvfp4_no_sr").to_dict() | {
    "oscillation_reset": {"from": 0.25, "every": 100, "window": 3, "ratio": 1e-9}
}


def llama(seed=0):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=48, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def fprop_weights(model):
    return {layer.plan.fprop_weight for layer in converted_layers(model).values()}


# transformers.Trainer


def hf_trainer(folder, steps, stop=None, recipe=LATE, **options):
    """(trainer, what each step's Fprop weight was). ``stop`` ends it early, as a kill would after a save."""
    pytest.importorskip("accelerate", reason="accelerate, which transformers.Trainer needs, is not installed")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nvfp4_train.integrations.transformers_trainer import set_up

    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **rest):
            seen.append(fprop_weights(model))
            control.should_training_stop |= state.global_step == stop

    data = [{"input_ids": torch.arange(i, i + 16) % 48, "labels": torch.arange(i, i + 16) % 48} for i in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_steps=5, logging_steps=100, disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=data)
    report = set_up(trainer, recipe)
    assert len(report.converted) == 14
    trainer.add_callback(Watch())
    return trainer, seen


def test_transformers_trainer_switches_late_and_resumes_bitwise(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, seen = hf_trainer(tmp_path / "whole", 10)
        whole.train()
        first, before = hf_trainer(tmp_path / "halves", 10, stop=5)
        first.train()
        second, after = hf_trainer(tmp_path / "halves", 10)
        torch.rand(100)
        second.train(resume_from_checkpoint=True)
    assert [kind == {"bf16"} for kind in seen] == [False] * 9 + [True]  # step 9 of 10 is the first at 0.82 or later
    assert [kind == {"bf16"} for kind in before + after] == [False] * 9 + [True]
    for one, two in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)
    keys = llama().state_dict().keys()
    assert whole.model.state_dict().keys() == keys


def test_transformers_trainer_counts_optimizer_steps(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, seen = hf_trainer(tmp_path, 6, gradient_accumulation_steps=3)
        trainer.train()
    assert [kind == {"bf16"} for kind in seen] == [False] * 5 + [True]


def test_transformers_trainer_tells_of_each_optimizer_step(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, _ = hf_trainer(tmp_path, 7, recipe=RESETS, gradient_accumulation_steps=2)
        told = []
        layer = next(iter(converted_layers(trainer.model).values()))
        trainer.add_callback(type("Watch", (type(trainer.callback_handler.callbacks[-1]),), {
            "on_step_end": lambda self, *_, **__: told.append((layer.oscillation_step, layer.oscillation is not None)),
        })())  # fmt: skip
        trainer.train()
    assert told == [(step, step in (2, 3, 4)) for step in range(7)]


# Lightning


def lightning_fit(folder, steps, recipe=LATE, resume=None, noise=0, stop=None, **options):
    """(module, callback, (step, Fprop weights) of each batch). ``stop``: ends it after so many of its ``steps``."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    from nvfp4_train.integrations.lightning import NVFP4Callback

    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.batches = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), []

        def training_step(self, batch, index):
            self.batches.append(batch)
            seen.append((self.trainer.global_step, fprop_weights(self)))
            return (self.model(batch) - batch).square().mean()

        def on_train_batch_end(self, *_):
            torch.rand(noise)  # whatever else draws from torch's generator between two batches
            self.trainer.should_stop |= self.trainer.global_step == stop

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(9)
    data = torch.utils.data.DataLoader(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), batch_size=8)
    changed = nt.load_recipe(recipe).to_dict() | {"keep_bf16": {}}
    callback = NVFP4Callback(changed, part="model", seed=4)
    save = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=steps, callbacks=[callback, save], logger=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=folder, **options,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, data, ckpt_path=resume)
    return module, callback, seen


def test_lightning_converts_before_the_optimizer_and_switches_late(tmp_path):
    module, callback, seen = lightning_fit(tmp_path, 10)
    assert callback.report.converted == ["0", "2"] and callback.layers(module) == ["model.0", "model.2"]
    assert [kind == {"bf16"} for _, kind in seen] == [step / 10 >= 0.82 for step, _ in seen]
    assert [step for step, _ in seen] == list(range(10))
    assert not torch.equal(module.model[0].weight, nn.Linear(16, 32).weight)


def test_lightning_counts_optimizer_steps_and_its_batches_draw_alike(tmp_path):
    """8 batches an epoch, 2 batches a step; the second half goes on from the first one's checkpoint."""
    whole, _, seen = lightning_fit(tmp_path / "whole", 8, accumulate_grad_batches=2)
    assert [kind == {"bf16"} for _, kind in seen] == [step / 8 >= 0.82 for step, _ in seen]
    noisy, _, _ = lightning_fit(tmp_path / "noisy", 8, accumulate_grad_batches=2, noise=7)
    for one, two in zip(whole.parameters(), noisy.parameters(), strict=True):
        assert torch.equal(one, two)
    half = {"recipe": LATE, "accumulate_grad_batches": 2}
    lightning_fit(tmp_path / "half", 4, **half)
    _, _, seen = lightning_fit(tmp_path / "rest", 8, resume=tmp_path / "half" / "last.ckpt", **half)
    assert seen[0][0] == 4 and seen[-1][0] == 7
    assert [kind == {"bf16"} for _, kind in seen] == [step / 8 >= 0.82 for step, _ in seen]


@pytest.mark.parametrize("stop", [None, 3])
def test_lightning_tells_of_each_optimizer_step(tmp_path, stop):
    """The same weights as a loop by hand; a run that was stopped in the window goes on with what the window saw."""
    half = {"recipe": RESETS, "accumulate_grad_batches": 2}
    trained, *_ = lightning_fit(tmp_path / "first", 7, stop=stop, **half)
    batches = trained.batches
    if stop is not None:
        trained, *_ = lightning_fit(tmp_path / "rest", 7, resume=tmp_path / "first" / "last.ckpt", **half)
        assert len(batches) == 2 * stop
        batches = batches + trained.batches
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    nt.convert(model, RESETS | {"keep_bf16": {}})
    optimizer, counts = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(7):
        nt.set_progress(model, step, 7)
        for batch in batches[2 * step : 2 * step + 2]:
            ((model(batch) - batch).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(nt.after_optimizer_step(model, step, 7))
    assert counts[5] > 500 and not any(counts[:5] + counts[6:])
    for one, two in zip(model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("recipe, why", [(LATE, "has a schedule"), (RESETS, "resets weights that oscillate")])
def test_lightning_without_an_end_refuses_a_recipe_that_goes_by_progress(tmp_path, recipe, why):
    with pytest.raises(ValueError, match=f"{why}: give the Trainer max_steps"):
        lightning_fit(tmp_path, -1, recipe=recipe, max_epochs=-1)


# Accelerate: no adapter is needed; the example's loop in small


def test_accelerate_needs_two_lines(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # transformers' Trainer has made one
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = llama()
    nt.convert(model, LATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens, losses, kinds = torch.arange(32).reshape(2, 16), [], []
    for step in range(10):
        nt.set_progress(model, step, 10)
        kinds.append(fprop_weights(model) == {"bf16"})
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    assert kinds == [False] * 9 + [True] and losses[-1] < losses[0] - 0.5


# torchtitan


def titan_model(recipe):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.models.llama3 import model_registry

    from nvfp4_train.integrations.torchtitan import NVFP4Converter

    spec = model_registry("debugmodel", converters=[NVFP4Converter.Config(recipe=recipe)])
    with torch.device("meta"):
        return spec.model.build()


def test_torchtitan_builds_a_converted_model():
    """From the tree of configs: the layers convert would choose, blocks kept by place, torchtitan's own checks."""
    model = titan_model("nvidia_nvfp4_last15")
    model.verify_module_protocol()
    names = [f"{part}" for part in ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
                                    "feed_forward.w3")]  # fmt: skip
    count = len(model.layers)
    wanted = {f"layers.{i}.{name}" for i in range(count - 1) for name in names}
    assert set(converted_layers(model)) == wanted
    assert all(layer.label == name for name, layer in converted_layers(model).items())
    assert type(model.lm_head).__name__ == "Linear"


def test_torchtitan_model_trains_and_its_schedule_moves():
    model = titan_model(LATE)
    from nvfp4_train.integrations.torchtitan import move_schedule

    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    layer = next(iter(converted_layers(model).values()))
    assert 0.001 < layer.weight.std() < 0.1  # torchtitan's own initialisation ran
    x = torch.randn(2, 8, layer.in_features)
    layer(x).square().mean().backward()
    assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()
    assert not move_schedule([model, nn.Linear(4, 4)], 5, 10) and "bf16" not in fprop_weights(model)
    assert move_schedule([model, nn.Linear(4, 4)], 9, 10) and fprop_weights(model) == {"bf16"}


def test_torchtitan_converter_refuses_what_converts_nothing():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    with pytest.raises(ValueError, match="matches no module"):
        titan_model(nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {"modules": ["nothing"]}})


def test_torchtitan_trainer_moves_the_schedule_before_each_step(monkeypatch):
    model = titan_model(LATE)
    from types import SimpleNamespace

    from torchtitan.trainer import Trainer

    from nvfp4_train.integrations.torchtitan import ScheduledTrainer

    seen = []
    monkeypatch.setattr(Trainer, "train_step", lambda self, data: seen.append((self.step, fprop_weights(model))))
    trainer = ScheduledTrainer.__new__(ScheduledTrainer)
    trainer.model_parts, trainer.config = [model], SimpleNamespace(training=SimpleNamespace(steps=10))
    for trainer.step in range(1, 11):  # torchtitan counts from 1
        trainer.train_step(iter(()))
    assert [kind == {"bf16"} for _, kind in seen] == [False] * 9 + [True]


def test_torchtitan_trainer_tells_of_each_optimizer_step(monkeypatch):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from types import SimpleNamespace

    from torchtitan.trainer import Trainer

    from nvfp4_train.integrations.torchtitan import ScheduledTrainer

    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        nt.convert(made, RESETS | {"keep_bf16": {}})
        return made

    @torch.no_grad()
    def move(of, step):
        for weight in of.parameters():
            weight += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))

    by_hand, trained = model(), model()
    monkeypatch.setattr(Trainer, "train_step", lambda self, data: move(trained, self.step))
    trainer = ScheduledTrainer.__new__(ScheduledTrainer)
    trainer.model_parts = [trained, nn.Linear(4, 4)]
    trainer.config = SimpleNamespace(training=SimpleNamespace(steps=7))
    counts = []
    for trainer.step in range(1, 8):
        trainer.train_step(iter(()))
        move(by_hand, trainer.step)
        counts.append(nt.after_optimizer_step(by_hand, trainer.step - 1, 7))
    assert counts[5] > 500 and not any(counts[:5] + counts[6:])
    for one, two in zip(by_hand.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, two)
