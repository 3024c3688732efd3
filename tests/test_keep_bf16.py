"""keep_bf16: blocks by place and modules by glob, applied to models."""

import pytest
from tiny_models import Block, model, quantized, reasons, recipe
from torch import nn

import nvfp4_train as nt
from nvfp4_train.conversion import ConversionError


@pytest.mark.parametrize(
    "blocks, count, converted",
    [
        ({"first": 1, "last": 2}, 6, [1, 2, 3]),
        ({"last": 1}, 2, [0]),
        ({"last_fraction": 0.15}, 6, [0, 1, 2, 3, 4]),
        ({"last_fraction": 0.34}, 3, [0]),
    ],
)
def test_first_and_last_blocks(blocks, count, converted):
    m = model(blocks=count)
    report = nt.convert(m, recipe(keep_bf16={"blocks": blocks, "modules": ["lm_head"]}))
    assert report.converted == [f"layers.{i}.{name}" for i in converted for name in ("up", "down")]
    kept = [i for i in range(count) if i not in converted]
    assert all(f"block {i} of the {count} in layers" in reasons(report)[f"layers.{i}.up"] for i in kept)


def test_blocks_are_the_outermost_list_not_the_longer_one_of_experts():
    m = model(blocks=2)
    for layer in m.layers:
        layer.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
    report = nt.convert(m, recipe(keep_bf16={"blocks": {"last": 1}, "modules": ["lm_head"]}))
    assert all(name.startswith("layers.0.") for name in report.converted) and len(report.converted) == 7


def test_sequential_and_mixed_blocks_are_found():
    m = nn.Sequential(Block(), Block(), Block())
    assert nt.convert(m, recipe(keep_bf16={"blocks": {"first": 1, "last": 1}})).converted == ["1.up", "1.down"]
    mixed = model(blocks=2)
    mixed.layers[1] = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    report = nt.convert(mixed, recipe(keep_bf16={"blocks": {"first": 1}, "modules": ["lm_head"]}))
    assert report.converted == ["layers.1.1"]


@pytest.mark.parametrize(
    "make, blocks, told",
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()), {"last": 1}, "no blocks found"),
        (lambda: nn.ModuleDict({"encoder": model(), "decoder": Block(), "more": model()}), {"last": 1},
         "encoder.layers and more.layers"),
        (model, {"first": 2, "last": 8}, "keeps 10 blocks, and layers has 4"),
        (model, {"first": 2, "last": 2}, "no block would be converted"),
        (lambda: model(blocks=1), {"last_fraction": 0.15}, "no block would be converted"),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be_kept_are_refused(make, blocks, told):
    m = make()
    with pytest.raises(ConversionError) as caught:
        nt.convert(m, recipe(keep_bf16={"blocks": blocks}))
    assert "keep_bf16.blocks" in str(caught.value) and told in str(caught.value)
    assert not quantized(m)


def test_globs_keep_what_they_match_and_all_inside():
    m = model()
    keep = {"modules": ["layers.1", "*.down", "embed", "layers.?.norm"], "if_present": ["lm_head", "absent"]}
    report = nt.convert(m, recipe(keep_bf16=keep))
    assert report.converted == ["layers.0.up", "layers.2.up", "layers.3.up"]
    told = reasons(report)
    assert told["layers.1.up"] == "keep_bf16: 'layers.1'" and told["layers.0.down"] == "keep_bf16: '*.down'"
    # a glob over modules that are never quantized is no error, and is told
    assert told["embed"] == "keep_bf16: 'embed', never quantized anyway"
    assert told["layers.0.norm"] == "keep_bf16: 'layers.?.norm', never quantized anyway"


def test_globs_that_match_nothing_are_errors_with_the_nearest_name():
    m = model()
    with pytest.raises(ConversionError) as caught:
        nt.convert(m, recipe(keep_bf16={"modules": ["lm_haed", "layers.9.up", "lm_head"]}))
    text = str(caught.value)
    assert "'lm_haed' matches no module; did you mean 'lm_head'?" in text
    assert "'layers.9.up' matches no module; did you mean 'layers." in text
    assert not quantized(m)
