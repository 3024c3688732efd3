"""A whole recipe as a dict, to change one thing in."""

NEAREST = {"format": "nvfp4", "block": "1x16", "rounding": "nearest"}
SQUARE = {"format": "nvfp4", "block": "16x16", "rounding": "nearest"}
STOCHASTIC = {"format": "nvfp4", "block": "1x16", "rounding": "stochastic"}
ROTATED = {**NEAREST, "hadamard": 16}


def base(**changes):
    recipe = {
        "name": "mine",
        "fprop": {"input": NEAREST, "weight": SQUARE},
        "dgrad": {"grad_output": STOCHASTIC, "weight": SQUARE},
        "wgrad": {"grad_output": {**STOCHASTIC, "hadamard": 16}, "input": ROTATED},
    }
    return recipe | changes
