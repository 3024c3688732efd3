"""The attention that models are built with: transformers' own, and no mask in a capture where there was none before."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from nvfp4_train.experiment import attention

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "causal": LlamaConfig(**SIZES),
    "a window shorter than the sequence": MistralConfig(**SIZES, sliding_window=8),
    "a window longer than the sequence": MistralConfig(**SIZES, sliding_window=64),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_computes_what_sdpa_does(name, padded):
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    inputs = {"input_ids": torch.randint(0, 64, (2, 16)), "use_cache": False}
    if padded:
        inputs["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
        inputs["attention_mask"][0, :3] = 0
    right = model(**inputs).logits
    attention.use_for_graphs(model)
    assert model.config._attn_implementation == attention.NAME
    assert torch.equal(model(**inputs).logits, right)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_capture_has_the_mask_of_the_calls_before(monkeypatch, name):
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    attention.use_for_graphs(model)
    masks = []
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, args, options: masks.append(options.get("attention_mask")), with_kwargs=True
    )
    inputs = {"input_ids": torch.randint(0, 64, (2, 16)), "use_cache": False}
    before = model(**inputs).logits
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(model(**inputs).logits, before)
    assert [mask is None for mask in masks] == [name != "a window shorter than the sequence"] * 2


def test_other_attention_stays():
    model = AutoModelForCausalLM.from_config(CONFIGS["causal"], attn_implementation="eager")
    attention.use_for_graphs(model)
    assert model.config._attn_implementation == "eager"
