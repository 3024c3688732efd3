"""Conversion: which layers change, what is told about the rest, and what is refused with the model left whole."""

import json
import logging

import pytest
import torch
from tiny_models import Block, Model, model, quantized, reasons, recipe
from torch import nn

import nvfp4_train as nt
from nvfp4_train.conversion import ConversionError, ConversionReport
from nvfp4_train.linear import QuantizedLinear

# What is converted


def test_block_linears_are_converted_and_the_head_is_kept():
    m = model()
    report = nt.convert(m, "nvidia_nvfp4")
    expected = [f"layers.{i}.{name}" for i in range(4) for name in ("up", "down")]
    assert report.converted == expected == quantized(m)
    assert [tuple(skipped) for skipped in report.skipped] == [("lm_head", "Linear", "keep_bf16: 'lm_head'")]
    assert type(m.lm_head) is nn.Linear and type(m.embed) is nn.Embedding
    assert all(m.get_submodule(name).label == name for name in expected)


def test_parameters_hooks_mode_and_keys_stay():
    m = model().eval()
    m.layers[0].up.weight.requires_grad_(False)
    m.layers[1].up.train()
    seen = []
    handle = m.layers[0].up.register_forward_hook(lambda *_: seen.append("after"))
    m.layers[0].up.register_forward_pre_hook(lambda *_: seen.append("before"))
    before = {name: id(parameter) for name, parameter in m.named_parameters()}
    keys = list(m.state_dict())
    nt.convert(m, recipe())
    assert {name: id(parameter) for name, parameter in m.named_parameters()} == before
    assert list(m.state_dict()) == keys
    assert not m.layers[0].up.weight.requires_grad and m.layers[0].down.weight.requires_grad
    assert m.layers[1].up.training and not m.layers[0].up.training
    m(torch.zeros(1, 2, dtype=torch.long))
    assert seen == ["before", "after"]
    handle.remove()
    m(torch.zeros(1, 2, dtype=torch.long))
    assert seen == ["before", "after", "before"]


def test_a_tied_head_stays_tied_when_it_is_converted():
    m = model()
    report = nt.convert(m, recipe())
    assert "lm_head" in report.converted
    assert m.lm_head.weight is m.embed.weight
    m(torch.arange(8).reshape(1, 8)).square().mean().backward()
    with torch.no_grad():
        m.embed.weight.add_(1.0)
    assert torch.equal(m.lm_head.weight, m.embed.weight)
    assert m.embed.weight.grad.abs().sum() > 0


def test_the_converted_model_computes_something_else_and_close():
    tokens = torch.arange(32).reshape(2, 16)
    plain, m = model(), model()
    nt.convert(m, "nvidia_nvfp4")
    plain_out, out = plain(tokens), m(tokens)
    error = ((out - plain_out).norm() / plain_out.norm()).item()
    assert 0.001 < error < 0.3  # 4-bit operands: a few percent a GEMM, and not nothing


def test_a_shared_module_is_replaced_in_every_place_and_once():
    m = nn.ModuleDict({"a": Block(), "b": Block()})
    m["b"].up = m["a"].up
    report = nt.convert(m, recipe())
    assert report.converted == ["a.up", "a.down", "b.down"]
    assert m["a"].up is m["b"].up and isinstance(m["b"].up, QuantizedLinear)


class Inherits(nn.Linear):
    """Adds its construction and nothing that runs later."""

    factor: float

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factor = 3.0

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def extra_repr(self):
        return f"factor={self.factor}"


class Scales(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_subclasses_with_a_forward_of_their_own_are_left_and_told():
    m = nn.ModuleDict({"inherits": Inherits(16, 16), "scales": Scales(16, 16), "patched": nn.Linear(16, 16),
                       "computed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
                       "lazy": nn.LazyLinear(16), "float64": nn.Linear(16, 16, dtype=torch.float64)})  # fmt: skip
    m["patched"].forward = lambda x: x
    m["compiled"] = nn.Linear(16, 16)
    m["compiled"].compile(backend="eager")
    report = nt.convert(m, recipe())
    assert report.converted == ["inherits"]
    told = reasons(report)
    assert "forward is not nn.Linear's" in told["scales"] and "forward is not nn.Linear's" in told["patched"]
    assert "convert first, then compile" in told["compiled"]
    assert "computed anew" in told["computed"] and "lazy" in told["lazy"] and "float64" in told["float64"]


def test_subclasses_that_would_lose_methods_are_left_and_told():
    class Scaled(nn.Linear):
        def scale(self):
            return 2.0

        def get_extra_state(self):
            return {"scale": 2.0}

    class Deeper(Scaled):
        pass

    class Logs:
        def log(self):
            return "log"

    class Mixed(nn.Linear, Logs):
        pass

    class Tagged(nn.Linear):
        tag = "gate"

    m = nn.ModuleDict({"plain": nn.Linear(16, 16), "scaled": Scaled(16, 16), "deeper": Deeper(16, 16),
                       "mixed": Mixed(16, 16), "tagged": Tagged(16, 16), "inherits": Inherits(16, 16)})  # fmt: skip
    keys = list(m.state_dict())
    report = nt.convert(m, recipe())
    assert report.converted == ["plain", "inherits"] and m["inherits"].factor == 3.0
    methods = "a subclass of nn.Linear with methods of its own: "
    assert reasons(report) == {
        "scaled": f"{methods}scale, get_extra_state",
        "deeper": f"{methods}scale, get_extra_state",
        "mixed": f"{methods}log",
        "tagged": "a subclass of nn.Linear with attributes of its own: tag",
    }
    assert list(m.state_dict()) == keys and m["deeper"].scale() == 2.0


def test_a_parametrized_bias_is_left_and_told():
    m = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nn.utils.parametrize.register_parametrization(m[1], "bias", nn.Tanh())
    report = nt.convert(m, recipe())
    assert report.converted == ["0"] and "its bias is computed anew" in reasons(report)["1"]
    m(torch.ones(1, 16))


def test_weights_outside_linears_are_told():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = nn.Parameter(torch.zeros(4, 8, 16))
            self.position = nn.Parameter(torch.zeros(1, 8, 16))

    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(8))

    m = nn.ModuleDict({"linear": nn.Linear(16, 16), "experts": Experts(), "conv": Conv1D(), "norm": nn.LayerNorm(16),
                       "embed": nn.Embedding(8, 16), "real_conv": nn.Conv1d(4, 4, 3),
                       "attention": nn.MultiheadAttention(16, 2)})  # fmt: skip
    report = nt.convert(m, recipe())
    assert report.converted == ["linear"]
    kinds = {skipped.name: skipped.kind for skipped in report.skipped}
    assert kinds == {"experts.gate_up": "Experts", "conv.weight": "Conv1D",
                     "attention.in_proj_weight": "MultiheadAttention",
                     "attention.out_proj": "NonDynamicallyQuantizableLinear"}  # fmt: skip
    told = reasons(report)
    assert (
        "3-D" in told["experts.gate_up"]
        and "2-D" in told["conv.weight"]
        and "never calls" in told["attention.out_proj"]
    )
    assert report.elements == (256, 256 + 512 + 128 + 768 + 256)


def test_the_fused_inference_path_of_a_transformer_layer_does_not_bypass_the_conversion():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(1, 4, 16)
    with torch.no_grad():
        before = layer(x)
        report = nt.convert(layer, recipe())
        after = layer(x)
    assert report.converted == ["linear1", "linear2"]
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)


# What is refused, with the model as it was


def test_a_recipe_that_converts_nothing_is_an_error():
    m = model()
    with pytest.raises(ConversionError, match=r"converts no layer.*4 x layers\.\*\.up.*lm_head"):
        nt.convert(m, recipe(keep_bf16={"modules": ["layers", "lm_head"]}))
    with pytest.raises(ConversionError, match="no nn.Linear"):
        nt.convert(nn.Sequential(nn.LayerNorm(4)), "nvidia_nvfp4")
    with pytest.raises(ConversionError, match="from_linear"):
        nt.convert(nn.Linear(16, 16), recipe())
    with pytest.raises(ConversionError, match="nn.Module"):
        nt.convert("llama", recipe())
    assert not quantized(m)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    m = model()
    with torch.no_grad():
        m.layers[2].norm.bias[3] = value
        m.layers[3].up.weight[0, 0] = value
    for name in ("nvidia_nvfp4", "bf16"):
        with pytest.raises(ConversionError, match="parameter layers.2.norm.bias"):
            nt.convert(m, name)
    assert not quantized(m)


def test_a_model_on_the_meta_device_is_converted():
    with torch.device("meta"):
        m = Model()
    assert len(nt.convert(m, "nvidia_nvfp4").converted) == 8
    assert m.layers[0].up.weight.is_meta


def test_a_converted_model_is_not_converted_again():
    m = model()
    nt.convert(m, "nvidia_nvfp4")
    for name in ("mxfp4", "nvidia_nvfp4", "bf16"):
        with pytest.raises(ConversionError, match="layers.0.up runs recipe nvidia_nvfp4"):
            nt.convert(m, name)
    assert m.layers[0].up.recipe.name == "nvidia_nvfp4"


def test_parts_may_have_recipes_of_their_own():
    m = model()
    nt.convert(m.layers[0], "nvidia_nvfp4")
    nt.convert(m.layers[1], "mxfp4")
    assert [m.layers[i].up.recipe.name for i in (0, 1)] == ["nvidia_nvfp4", "mxfp4"]


def test_a_backend_that_cannot_be_leaves_the_model_whole():
    m = model()
    for backend, told in (("tritn", "tritn"), ("native", "Blackwell")):
        with pytest.raises(ValueError, match=told):
            nt.convert(m, "nvidia_nvfp4", backend=backend)
    assert not quantized(m)


# bf16, the report


def test_bf16_leaves_the_model_as_it_is_and_serves_the_same_loop():
    m = model()
    before = dict(m.named_modules())
    report = nt.convert(m, "bf16")
    assert dict(m.named_modules()) == before and report.converted == [] and len(report.skipped) == 9
    assert "quantizes nothing" in str(report)
    assert nt.set_progress(m, 5, 10) is False
    with nt.bf16_forward(m):
        pass


def test_report_as_table_and_as_data():
    report = nt.convert(model(), recipe(keep_bf16={"if_present": ["lm_head"]}))
    assert isinstance(report, ConversionReport)
    lines = str(report).split("\n")
    # 4 x (512 + 512) of 4608 elements; the tied head counts as the matmul weight it is
    assert lines[0] == "recipe nvidia_nvfp4: 8 layers converted, 88.9% of the matmul weights"
    assert lines[1].split() == ["converted", "4", "x", "layers.*.up"]
    assert lines[-1].split() == ["left", "1", "x", "lm_head", "Linear:", "keep_bf16:", "'lm_head'"]
    data = json.loads(json.dumps(report.to_dict()))
    assert data["converted"] == report.converted and data["recipe"] == "nvidia_nvfp4"
    assert data["skipped"] == [{"name": "lm_head", "kind": "Linear", "reason": "keep_bf16: 'lm_head'"}]


# Models of transformers


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
              "num_key_value_heads": 2, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0} | changes  # fmt: skip
    kind = config.pop("model_type", "llama")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))


def test_llama_with_tied_head_trains():
    m = llama(tie_word_embeddings=True)
    report = nt.convert(m, "nvidia_nvfp4_last15")
    assert len(report.converted) == 14 and all(".layers.2." not in name for name in report.converted)
    assert m.lm_head.weight is m.model.embed_tokens.weight
    tokens = torch.arange(16).reshape(1, 16)
    m(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_conv1d_of_gpt2_is_converted_like_the_linear_layer_it_is():
    """Its products equal those of an nn.Linear with the transposed weight, bit for bit, forward and backward."""
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    m = nn.ModuleDict({"conv": Conv1D(48, 32), "linear": nn.Linear(32, 48)})
    with torch.no_grad():
        m["linear"].weight.copy_(m["conv"].weight.T)
        m["linear"].bias.copy_(m["conv"].bias.uniform_())
    keys = list(m.state_dict())
    report = nt.convert(m, recipe())
    assert report.converted == ["conv", "linear"] and isinstance(m["conv"], Conv1D) and list(m.state_dict()) == keys
    x = torch.randn(2, 20, 32)
    outputs = []
    for name in ("conv", "linear"):
        torch.manual_seed(7)
        inner = x.clone().requires_grad_()
        y = m[name](inner)
        y.square().sum().backward()
        weight = m[name].weight.grad
        outputs.append((y, inner.grad, weight.T if name == "conv" else weight, m[name].bias.grad))
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    assert "recipe=nvidia_nvfp4" in repr(m["conv"])
    assert nt.convert(llama(model_type="gpt2", n_embd=16, n_layer=2, n_head=2), "nvidia_nvfp4").elements[0] > 0
