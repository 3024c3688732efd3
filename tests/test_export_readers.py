"""Exported folders read by others: compressed-tensors, ModelOpt and transformers' own loader.

They are no dependency: the tests skip where a reader is not installed (compressed-tensors, nvidia-modelopt).
"""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from test_export import MOE, TOKENS, model, used_by_fprop

import nvfp4_train as nt
from nvfp4_train.exporting.writing import export

transformers = pytest.importorskip("transformers")
BITS = 2**-22  # the readers multiply by their own float32 form of the global scale: two roundings


def values_of(made, amax):
    """float64: what Fprop multiplied with, global scale included"""
    return made.operand.double() * amax.double() / 2688


def stems(tensors):
    return [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]


def compare(decoded, used):
    assert len(used) == 14
    for stem, (made,) in used.items():
        wanted = values_of(made, made.amax)
        assert ((decoded[stem].double() - wanted).abs() <= BITS * wanted.abs()).all(), stem
        assert (decoded[stem] != 0).any()


def test_compressed_tensors_reads_what_fprop_used(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    built = model()
    used = used_by_fprop(built)
    report = export(built, tmp_path / "out", "compressed-tensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    arguments = config.config_groups["group_0"].weights
    assert config.format == "nvfp4-pack-quantized" and arguments.num_bits == 4 and arguments.group_size == 16
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    decoded = {}
    for stem in stems(tensors):
        packed = tensors[f"{stem}.weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        decoded[stem] = dequantize(
            x_q=codes, scale=tensors[f"{stem}.weight_scale"].float(), args=arguments, dtype=torch.float32,
            global_scale=tensors[f"{stem}.weight_global_scale"],
        )  # fmt: skip
    compare(decoded, used)
    bits = 8 * sum(t.numel() * t.element_size() for n, t in tensors.items() if n.rpartition(".")[0] in decoded)
    assert bits / sum(t.numel() for t in decoded.values()) == report.bits_per_weight < 4.53


def test_modelopt_reads_what_fprop_used(tmp_path):
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    built = model()
    used = used_by_fprop(built)
    export(built, tmp_path / "out", "modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    decoded = {}
    for stem in stems(tensors):
        packed = tensors[f"{stem}.weight"]
        shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
        decoded[stem] = NVFP4QTensor(shape, torch.float32, packed).dequantize(
            dtype=torch.float32, scale=tensors[f"{stem}.weight_scale"],
            double_scale=tensors[f"{stem}.weight_scale_2"], block_sizes={-1: 16},
        )  # fmt: skip
    compare(decoded, used)
    # its own translation of hf_quant_config.json is what stands in config.json
    beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(beside) == said
    amax = {name: 1.5 for name in used}
    export(built, tmp_path / "w4a4", "modelopt", input_amax=amax)
    beside = json.loads((tmp_path / "w4a4" / "hf_quant_config.json").read_text())
    said = json.loads((tmp_path / "w4a4" / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(beside) == said and said["quant_algo"] == "NVFP4"


@pytest.mark.parametrize("calibrated", [False, True])
def test_transformers_loads_the_folder_through_compressed_tensors(tmp_path, calibrated):
    """Dense models: its loader (5.24) leaves out the global scale of experts, which engines read themselves."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    built = model()
    used = used_by_fprop(built)
    amax = {name: 4.0 for name in used} if calibrated else None
    export(built, tmp_path / "out", "compressed-tensors", input_amax=amax)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    ours = nt.load_exported(tmp_path / "out")
    for (name, one), (other, two) in zip(loaded.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        assert ((one - two).abs() <= 2**-7 * two.abs()).all(), name  # it dequantizes in bfloat16
    with torch.no_grad():
        one, two = loaded(input_ids=TOKENS).logits, ours(input_ids=TOKENS).logits
    assert (one - two).norm() / two.norm() < 2**-5


def test_compressed_tensors_decompresses_every_expert(tmp_path):
    """By its own compressor, as engines see the folder: one linear layer for each matrix of each expert."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    built = model(kind="mixtral", **MOE)
    used = used_by_fprop(built)
    export(built, tmp_path / "out", "compressed-tensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for expert in range(3):
        stem = f"model.layers.1.block_sparse_moe.experts.{expert}"
        read = {}
        for name in ("w1", "w2", "w3"):
            parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{stem}.{name}.")}
            read[name] = compressor.decompress(parts, config.config_groups["group_0"])["weight"].double()
        place = "model.layers.1.mlp.experts"
        for ours, key in ((torch.cat([read["w1"], read["w3"]]), "gate_up_proj"), (read["w2"], "down_proj")):
            made = used[f"{place}.{key}"][expert]
            wanted = values_of(made, made.amax)
            assert ((ours - wanted).abs() <= 2**-7 * wanted.abs()).all()  # it computes in bfloat16
            assert ours.any()
