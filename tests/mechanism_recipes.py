"""Recipes as dicts, one for each mechanism and format, to run layers on."""


def _gemms(fprop_input, fprop_weight, dgrad_grad, dgrad_weight, wgrad_grad, wgrad_input, **more):
    recipe = {
        "fprop": {"input": fprop_input, "weight": fprop_weight},
        "dgrad": {"grad_output": dgrad_grad, "weight": dgrad_weight},
        "wgrad": {"grad_output": wgrad_grad, "input": wgrad_input},
    }
    return recipe | more


def _same(spec, **more):
    return _gemms(*[spec] * 6, **more)


NVFP4 = {"format": "nvfp4", "block": "1x16", "rounding": "nearest"}
SR = NVFP4 | {"rounding": "stochastic"}
MXFP8 = {"format": "mxfp8", "block": "1x32", "rounding": "nearest", "scale_rule": "up"}
FP8 = {"format": "fp8", "block": "1x128", "rounding": "nearest", "scale_rule": "amax"}
FP8_SQUARE = FP8 | {"block": "128x128"}
DELAYED = {"format": "fp8", "block": "tensor", "rounding": "nearest", "scale_rule": "delayed", "history": 4}
DELAYED_GRAD = DELAYED | {"format": "fp8_e5m2"}
MXFP4 = {"format": "mxfp4", "block": "1x32", "rounding": "nearest", "scale_rule": "floor"}
QUEST = MXFP4 | {"scale_rule": "down", "clip": 2.92247856, "hadamard": 32, "signs": "none", "mask_clipped": True}
TSENG = MXFP4 | {"rounding": "stochastic", "headroom": "4/3", "hadamard": 32, "signs": "step"}
FOUR = NVFP4 | {"four_over_six": "mse", "scale_range": 256}
EDEN = NVFP4 | {
    "rounding": "stochastic_scale", "scale_range": 255.99, "headroom": 0.988125, "hadamard": 32, "signs": "step",
}  # fmt: skip
DOUBLE = NVFP4 | {"outer": "1x128"}
DOUBLE_SR = DOUBLE | {"rounding": "stochastic", "hadamard": 16, "signs": "step"}
HOT = {"part": "channels", "fraction": 0.1, **MXFP8}
INT4 = {
    "format": "custom", "element": "int4", "scale": "float32", "block": "1x16", "rounding": "nearest",
    "scale_rule": "amax", "hadamard": 16,
}  # fmt: skip
MEAN = {"part": "mean"}

RECIPES = {
    "mxfp8": _same(MXFP8, weight_match=False),
    "mxfp6_e3m2": _same(MXFP8 | {"format": "mxfp6_e3m2", "scale_rule": "floor"}, weight_match=False),
    "mxfp6_e2m3": _same(MXFP8 | {"format": "mxfp6_e2m3", "scale_rule": "even"}, weight_match=False),
    "deepseek": _gemms(FP8, FP8_SQUARE, FP8, FP8_SQUARE, FP8, FP8),
    "delayed": _gemms(DELAYED, DELAYED, DELAYED_GRAD, DELAYED, DELAYED_GRAD, DELAYED),
    "quartet": _gemms(
        QUEST, QUEST, TSENG, TSENG | {"requantize": True}, TSENG, TSENG | {"requantize": True}, weight_match=False
    ),
    "tseng": _gemms(*[{"format": "bf16"}] * 2, *[TSENG] * 4, weight_match=False) | {"fprop": "bf16"},
    "four_over_six": _gemms(FOUR, FOUR | {"block": "16x16"}, SR, FOUR | {"block": "16x16"}, SR, NVFP4),
    "quartet2": _gemms(
        FOUR, FOUR, EDEN, EDEN | {"requantize": True}, EDEN, EDEN | {"requantize": True}, weight_match=False
    ),
    "tetrajet2": _gemms(
        DOUBLE | {"split": HOT}, DOUBLE, DOUBLE_SR, DOUBLE_SR | {"requantize": True}, DOUBLE_SR,
        DOUBLE_SR | {"requantize": True, "split": HOT}, weight_match=False,
    ),  # fmt: skip
    "averis": _gemms(
        NVFP4 | {"split": MEAN}, NVFP4 | {"block": "16x16"}, SR | {"split": MEAN}, NVFP4 | {"block": "16x16"},
        SR | {"split": MEAN}, NVFP4 | {"split": MEAN},
    ),  # fmt: skip
    "ufp4": _gemms(
        INT4, INT4, INT4 | {"rounding": "stochastic"}, INT4, INT4 | {"rounding": "stochastic"}, INT4,
        weight_match=False, emulation_only=True,
    ),  # fmt: skip
    "channel": _same(
        {"format": "custom", "element": "e2m1", "scale": "float32", "block": "channel", "rounding": "nearest",
         "scale_rule": "amax"},
        weight_match=False,
    ),
    "tensor": _same(
        {"format": "custom", "element": "e2m1", "scale": "float32", "block": "tensor", "rounding": "nearest",
         "scale_rule": "amax"},
    ),
    "int8_e4m3": _same(
        {"format": "custom", "element": "int8", "scale": "e4m3", "block": "1x32", "rounding": "nearest",
         "scale_rule": "nvfp4"},
        weight_match=False, emulation_only=True,
    ),
    "rotated_everywhere": _gemms(*[NVFP4 | {"hadamard": 64, "signs": "step"}] * 6, weight_match=False),
    "masked_nvfp4": _gemms(
        NVFP4 | {"mask_clipped": True, "hadamard": 16}, NVFP4 | {"mask_clipped": True, "hadamard": 16}, *[NVFP4] * 4,
        weight_match=False,
    ),
}  # fmt: skip
RECIPES = {name: {"name": name, **recipe} for name, recipe in RECIPES.items()}
