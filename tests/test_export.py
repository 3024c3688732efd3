"""Export: the folder's bytes are those Fprop multiplied with; what is left, what is refused; loading and going on."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.conversion import converted_layers
from nvfp4_train.exporting.loading import load_exported
from nvfp4_train.exporting.writing import ExportError, calibrate, export

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
FORMATS = ("modelopt", "compressed-tensors")
TOKENS = torch.arange(40).reshape(2, 20)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def model(recipe="nvidia_nvfp4", kind="llama", seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(LLAMA | changes))
    built = transformers.AutoModelForCausalLM.from_config(config)
    nt.convert(built, recipe)
    return built


class Weights:
    """Keeps the weight operand of every Fprop: what the GEMM multiplied with, and its amax."""

    def __init__(self):
        self.seen = {}

    def quantized(self, event):
        if event.operand == "fprop.weight":
            self.seen.setdefault(event.layer, []).append(event.made)

    def multiplied(self, event):
        pass


def used_by_fprop(built):
    watch = Weights()
    with ledger.observing(watch), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        built(input_ids=TOKENS)
    return watch.seen


def unpacked(tensors, stem, format):
    """code x block scale and the global scale of a layer, read from the bytes by hand; float64"""
    codes = tensors[f"{stem}.weight" if format == "modelopt" else f"{stem}.weight_packed"]
    scales = tensors[f"{stem}.weight_scale"]
    values = torch.zeros(codes.shape[0], 2 * codes.shape[1], dtype=torch.float64)
    table = torch.tensor(E2M1, dtype=torch.float64)
    values[:, 0::2], values[:, 1::2] = table[(codes & 15).long()], table[(codes >> 4).long()]
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (codes.shape[0], codes.shape[1] // 8)
    if format == "modelopt":
        factor = tensors[f"{stem}.weight_scale_2"].double()
        assert factor.shape == ()
    else:
        factor = 1 / tensors[f"{stem}.weight_global_scale"].double()
        assert factor.shape == (1,)
    return values * scales.double().repeat_interleave(16, dim=1), factor.reshape(())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "nvidia_nvfp4_1d_weights", "four_over_six"])
def test_the_folder_holds_what_fprop_multiplied_with(tmp_path, format, recipe):
    built = model(recipe)
    largest = 1536 if recipe == "four_over_six" else 2688  # of code x block scale: four over six aims at 6 x 256
    used = used_by_fprop(built)
    report = export(built, tmp_path / "out", format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(report.layers) == {f"{name}.weight" for name in used} and len(used) == 14
    for stem, (made,) in used.items():
        values, factor = unpacked(tensors, stem, format)
        assert torch.equal(values, made.operand.double())  # codes and block scales: bit for bit
        assert abs(factor * largest / made.amax.double() - 1) < 2**-23  # float32's own rounding of the factor
    for name, tensor in built.state_dict().items():
        if f"{name}" in report.layers:
            continue
        wanted = tensor if tensor.dim() == 1 else tensor.bfloat16()
        assert torch.equal(tensors[name], wanted), name
    assert 4.5 < report.bits_per_weight < 4.5 + 32 / (32 * 64) + 1e-9  # the one float32 of the smallest layer
    assert report.left == ["lm_head"]


def test_the_config_says_how_to_read_it(tmp_path):
    for format in FORMATS:
        export(model(), tmp_path / format, format)
    modes = {file.stat().st_mode for file in (tmp_path / "modelopt").iterdir()}
    assert len(modes) == 1  # who may read the config may read the weights
    config = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 64
    said = config["quantization_config"]
    assert said["format"] == "nvfp4-pack-quantized" and said["ignore"] == ["lm_head"]
    group = said["config_groups"]["group_0"]
    assert group["weights"]["group_size"] == 16 and group["weights"]["strategy"] == "tensor_group"
    assert group["input_activations"] is None
    said = json.loads((tmp_path / "modelopt" / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["quant_algo"], said["ignore"]) == ("modelopt", "W4A16_NVFP4", ["lm_head"])
    beside = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["quant_algo"] == "W4A16_NVFP4"
    assert beside["quantization"]["exclude_modules"] == ["lm_head"]


@pytest.mark.parametrize("format", FORMATS)
def test_experts_go_out_one_by_one_under_the_names_engines_know(tmp_path, format):
    """One parameter of all experts becomes w1, w2 and w3 of each; gate and up share the global scale of training."""
    built = model(kind="mixtral", **MOE)
    used = used_by_fprop(built)
    report = export(built, tmp_path / "out", format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert report.left == ["lm_head", *(f"model.layers.{i}.block_sparse_moe.gate" for i in range(2))]
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts"
        ours = {key: used[f"{place}.{key}"] for key in ("gate_up_proj", "down_proj")}
        assert len(ours["down_proj"]) == 3  # every expert had tokens
        for expert in range(3):
            stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            gate, factor = unpacked(tensors, f"{stem}.w1", format)
            up, same = unpacked(tensors, f"{stem}.w3", format)
            down, _ = unpacked(tensors, f"{stem}.w2", format)
            assert torch.equal(torch.cat([gate, up]), ours["gate_up_proj"][expert].operand.double())
            assert torch.equal(down, ours["down_proj"][expert].operand.double())
            assert factor == same
    assert not any("w1" in name for group in report.unequal_scales for name in group)


@pytest.mark.parametrize("kind, changes", [("llama", {}), ("mixtral", MOE), ("llama", {"tie_word_embeddings": True})])
def test_loading_it_and_going_on_computes_the_same_fprop(tmp_path, kind, changes):
    """16x16 weights quantize again to the same codes and scales; the amax comes back within float32's rounding."""
    built = model(kind=kind, **changes)
    export(built, tmp_path / "out", "compressed-tensors")
    loaded = load_exported(tmp_path / "out")
    nt.convert(loaded, "nvidia_nvfp4")
    before, after = used_by_fprop(built), used_by_fprop(loaded)
    assert before.keys() == after.keys()
    for name in before:
        for one, two in zip(before[name], after[name], strict=True):
            assert torch.equal(one.operand, two.operand), name
            assert abs(two.amax / one.amax - 1) <= 2**-22
    loaded(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loaded.parameters())
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == bool(changes.get("tie_word_embeddings"))


def test_a_packed_head_is_no_longer_tied(tmp_path):
    """With nothing kept in BF16 the head is 4-bit, and the embedding it shared its weight with is not."""
    recipe = nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}}
    built = model(recipe, tie_word_embeddings=True)
    report = export(built, tmp_path / "out")
    assert "lm_head.weight" in report.layers and report.left == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    loaded = load_exported(tmp_path / "out")
    assert torch.equal(loaded.model.embed_tokens.weight, built.model.embed_tokens.weight.bfloat16().float())
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_scales_of_parallel_layers(tmp_path):
    """As trained they differ, which the report says; shared, they are one, and only those weights have moved."""
    built = model()
    plain = export(built, tmp_path / "plain")
    names = [{name.split(".")[-2] for name in group} for group in plain.unequal_scales]
    assert names == [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}] * 2
    assert "an engine that fuses them keeps only the largest" in str(plain)
    shared = export(built, tmp_path / "shared", shared_scales=True)
    assert shared.unequal_scales == [] and 0.001 < shared.change < 0.12  # below NVFP4's own error
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "shared"))
    for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        part = "self_attn" if "q_proj" in family else "mlp"
        stems = [f"model.layers.0.{part}.{name}" for name in family]
        factors = [float(unpacked(after, stem, "modelopt")[1]) for stem in stems]
        assert len(set(factors)) == 1
        assert factors[0] == max(float(unpacked(before, stem, "modelopt")[1]) for stem in stems)
        for stem in stems:  # still the weight, as well as NVFP4 can say it
            values, factor = unpacked(after, stem, "modelopt")
            weight = built.get_parameter(f"{stem}.weight").double()
            assert (values * factor - weight).norm() / weight.norm() < 0.13
    untouched = [n for n in before if ".down_proj" in n or ".o_proj" in n or "norm" in n]
    for name in untouched:
        assert torch.equal(before[name].reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8))


def test_calibrated_inputs(tmp_path):
    """The scale of the inputs is the largest amax that Fprop saw; q, k and v read one tensor."""
    built = model()
    seen = {}

    def keep(name):
        return lambda module, inputs: seen.__setitem__(
            name, max(seen.get(name, 0.0), inputs[0].bfloat16().abs().max().item())
        )

    hooks = [m.register_forward_pre_hook(keep(n)) for n, m in converted_layers(built).items()]
    amax = calibrate(built, [TOKENS, TOKENS.flip(1)])
    for hook in hooks:
        hook.remove()
    assert amax == pytest.approx(seen, rel=2**-7)  # the norm before q is float32, and the hook rounds it to bf16
    modelopt = export(built, tmp_path / "modelopt", "modelopt", input_amax=amax)
    export(built, tmp_path / "ct", "compressed-tensors", input_amax=amax)
    assert modelopt.calibrated
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("modelopt", "ct"))
    for name, value in amax.items():
        assert one[f"{name}.input_scale"] == torch.tensor(value) / 2688
        assert two[f"{name}.input_global_scale"] == 2688 / torch.tensor(value)
    said = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    said = json.loads((tmp_path / "modelopt" / "config.json").read_text())["quantization_config"]
    assert said["quant_algo"] == "NVFP4"
    with pytest.raises(ExportError, match="at least one batch"):
        calibrate(built, [])
    torch.manual_seed(0)
    part = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model("llama", **LLAMA))
    nt.convert(part.model, nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}})
    assert calibrate(part, [TOKENS, TOKENS.flip(1)]) == amax  # labels that begin at "layers." find their names


def test_mxfp4_weights_go_out_with_their_own_scales(tmp_path):
    built = model("mxfp4")
    used = used_by_fprop(built)
    report = export(built, tmp_path / "out", "compressed-tensors")
    assert report.kind == "mxfp4" and report.bits_per_weight == 4.25
    loaded = load_exported(tmp_path / "out")
    for stem, (made,) in used.items():
        assert torch.equal(loaded.get_parameter(f"{stem}.weight").double(), made.operand.double())
    with pytest.raises(ExportError, match="modelopt has no folder for"):
        export(built, tmp_path / "no", "modelopt")


# What is refused


def test_what_cannot_be_exported_is_refused_by_name(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").write_text("")
    broken = model()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    late = model("nvidia_nvfp4_late_fprop")
    nt.set_progress(late, 9, 10)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **LLAMA))
    gpt2 = model(kind="gpt2", n_embd=32, n_layer=1, n_head=2)
    gpt_oss = model(kind="gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=32)
    for built, told in (
        (broken, "model.layers.1.mlp.up_proj.weight holds NaN"),
        (late, "q_proj: Fprop runs in BF16 at this point"),
        (plain, "no converted layer"),
        (gpt2, "transposed weights of Conv1D"),
        (gpt_oss, r"experts kept as \[in, out\]"),
        (model(intermediate_size=40), "its 40 columns are no multiple of 16"),
        (nn.Linear(4, 4), "only models of transformers"),
        (model(kind="granitemoe", num_local_experts=2, num_experts_per_tok=1), "keep all experts in one tensor"),
        (model("deepseek_v3_fp8"), "only NVFP4 and MXFP4 weights can be exported, not e4m3"),
    ):
        with pytest.raises(ExportError, match=told):
            export(built, tmp_path / "out")
    with pytest.raises(ExportError, match="unknown format 'gguf'"):
        export(model(), tmp_path / "out", "gguf")
    with pytest.raises(ExportError, match="not empty"):
        export(model(), full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


def test_a_damaged_folder_is_refused_by_name(tmp_path):
    export(model(), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    stem = "model.layers.0.mlp.up_proj"

    def put(changed):
        save_file(changed, file, metadata={"format": "pt"})

    put({name: t for name, t in whole.items() if name != f"{stem}.weight_scale_2"})
    with pytest.raises(ExportError, match=f"tensor {stem}.weight_scale_2 is missing"):
        load_exported(tmp_path / "out")
    put({name: t for name, t in whole.items() if not name.startswith(stem)})
    with pytest.raises(ExportError, match=f"weights are missing: {stem}.weight"):
        load_exported(tmp_path / "out")
    put(whole | {f"{stem}.weight_scale_2": torch.tensor(float("nan"))})
    with pytest.raises(ExportError, match=f"{stem}.weight holds NaN"):
        load_exported(tmp_path / "out")
    file.write_bytes(b"torn")
    with pytest.raises(ExportError, match="cannot be read"):
        load_exported(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="awq"):
        load_exported(tmp_path / "out")
    with pytest.raises(ExportError, match="no folder of quantized weights"):
        load_exported(tmp_path)
