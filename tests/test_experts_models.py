"""The experts of transformers' models: which are converted, that they train, and that routing and gates stay theirs."""

import copy
import io
import pickle

import pytest
import torch
from tiny_models import reasons, recipe

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.experts import QuantizedExperts

torch.set_num_threads(1)

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}  # fmt: skip


def moe(kind, seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(COMMON | MODELS[kind]))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def converted_experts(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantizedExperts)}


@pytest.mark.parametrize("kind", MODELS)
def test_the_experts_of_a_model_are_converted_and_train(kind):
    model, plain = moe(kind), moe(kind)
    keys, classes = list(model.state_dict()), {type(m) for m in model.modules()}
    report = nt.convert(model, "nvidia_nvfp4")
    found = converted_experts(model)
    assert found and set(found) <= set(report.converted)
    assert list(model.state_dict()) == keys
    assert all(any(isinstance(m, kind_) for kind_ in classes) for m in found.values())
    tokens = torch.arange(40).reshape(2, 20)
    with ledger.recording() as log, torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        reference = plain(input_ids=tokens, labels=tokens).loss
    assert abs(out.loss - reference) < 0.1 and out.loss != reference
    ran = {(row["layer"], row["gemm"], row["a"] != "bf16") for row in log.gemms() if ".experts." in row["layer"]}
    assert ran == {
        (f"{name}.{key}", gemm, True)
        for name in found for key in ("gate_up_proj", "down_proj") for gemm in ("fprop", "dgrad", "wgrad")
    }  # fmt: skip
    assert all(p.grad is not None and p.grad.isfinite().all() for m in found.values() for p in m.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_in_bf16_the_converted_experts_are_the_model_s_own(kind):
    """With every operand in bf16 the layer must be the eager one up to the rounding of its operands: the routing,
    the gate, transposed weights and biases are the model's."""
    model = moe(kind)
    layer = next(m for name, m in model.named_modules() if hasattr(type(m), "_apply_gate"))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_((torch.randn_like(p) / 4).bfloat16())
    late = nt.load_recipe("nvidia_nvfp4_late_both").to_dict()
    late["schedule"] = [{"from": 0.5, "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}]
    twin = QuantizedExperts.of(copy.deepcopy(layer), late, "experts")
    assert nt.set_progress(twin, 9, 10) and set(twin.plan) == {"bf16"}
    x = torch.randn(12, 32).bfloat16().float()
    index = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    index[index == 1] = 3  # nobody chooses expert 1
    weights = torch.rand(12, 2)
    layer.config._experts_implementation = "eager"
    outputs = []
    for module in (layer, twin):
        inner = x.clone().requires_grad_()
        y = module(inner, index, weights)
        y.square().sum().backward()
        outputs.append((y.detach(), inner.grad, *(p.grad for p in module.parameters())))
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 2**-7  # operands rounded to bf16: at most 2^-8 each, and far less on average


def test_schedule_forward_in_bf16_and_copies_reach_the_experts():
    model = moe("mixtral")
    nt.convert(model, "nvidia_nvfp4_late_fprop")
    layer = next(iter(converted_experts(model).values()))
    assert layer.plan.fprop_weight != "bf16"
    with nt.bf16_forward(model):
        assert layer.plan.fprop_weight == "bf16"
    assert nt.set_progress(model, 9, 10) and layer.plan.fprop_weight == "bf16"
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x, index, weights = torch.randn(8, 32), torch.randint(0, 4, (8, 2)), torch.rand(8, 2)
    layer.train()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), 
                 next(iter(converted_experts(torch.load(buffer, weights_only=False)).values()))):  # fmt: skip
        assert type(twin) is type(layer) and twin.plan == layer.plan and twin.label == layer.label
        torch.manual_seed(1)
        one = layer(x, index, weights)
        torch.manual_seed(1)
        assert torch.equal(one, twin(x, index, weights))


def test_experts_of_mixtral_are_converted_and_its_router_is_told():
    m = moe("mixtral")
    report = nt.convert(m, "nvidia_nvfp4")
    experts = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert [name for name in report.converted if "experts" in name] == experts and len(report.converted) == 10
    assert {s.name for s in report.skipped if s.kind == "MixtralTopKRouter"} == {
        f"model.layers.{i}.mlp.gate.weight" for i in range(2)
    }
    assert report.elements[0] / report.elements[1] > 0.9


def test_experts_can_be_kept_in_bf16():
    m = moe("mixtral")
    report = nt.convert(m, recipe(keep_bf16={"modules": ["*.experts", "lm_head"]}))
    assert len(report.converted) == 8
    assert reasons(report)["model.layers.0.mlp.experts"] == "keep_bf16: '*.experts'"
    assert type(m.model.layers[0].mlp.experts).__name__ == "MixtralExperts"


@pytest.mark.parametrize("name", ["averis", "quartet"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_recipes_that_do_more_than_quantize_two_operands_train_experts(kind, name):
    """With plain and with transposed weights and biases; all three GEMMs ran in the recipe's formats."""
    model = moe(kind)
    report = nt.convert(model, name)
    assert len(report.converted) == 10
    tokens = torch.arange(40).reshape(2, 20)
    with ledger.recording() as log:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    assert loss.isfinite()
    ran = {(row["layer"], row["gemm"], row["a"]) for row in log.gemms() if ".experts." in row["layer"]}
    assert len(ran) == 2 * 2 * 3 and all(a != "bf16" for _, _, a in ran)
    for layer in converted_experts(model).values():
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


def test_recipes_that_remember_leave_experts_and_say_so():
    report = nt.convert(moe("mixtral"), "tetrajet2")
    assert len(report.converted) == 8
    told = reasons(report)["model.layers.1.mlp.experts"]
    assert "recipe tetrajet2 keeps norms of channels, moves of each weight from step to step" in told
