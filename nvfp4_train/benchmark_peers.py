"""Other libraries' NVFP4 quantizers of a matrix, where they are installed: what ``bench quantize`` stands beside.

Each is called as its documentation does it: 1x16 blocks, nearest, packed codes and block scales out of BF16. torchao's
finds no global amax here, and is given one, as our own kernels are.
"""

import importlib
from collections.abc import Callable

from torch import Tensor

BLOCK = 16


def peers(x: Tensor) -> dict[str, Callable[[], object]]:
    """name -> call, for each of torchao, fouroversix and modelopt that can be imported; ``x``: BF16 [R, C]."""
    found = {}
    for name, make in {"torchao": _torchao, "fouroversix": _fouroversix, "modelopt": _modelopt}.items():
        try:
            found[name] = make(x)
        except ImportError:
            continue
    return found


def _torchao(x: Tensor) -> Callable[[], object]:
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = module.per_tensor_amax_to_scale(x.abs().amax().float())
    return lambda: module.nvfp4_quantize(x, BLOCK, scale)


def _fouroversix(x: Tensor) -> Callable[[], object]:
    reference = importlib.import_module("fouroversix.quantize.pytorch.reference")
    utils = importlib.import_module("fouroversix.utils")
    format_, rule = utils.DataType("nvfp4"), utils.ScaleRule("static_6")
    return lambda: reference.quantize_to_fp4(x, fp4_format=format_, scale_rule=rule, use_blackwell_scale_layout=False)


def _modelopt(x: Tensor) -> Callable[[], object]:
    tensor = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    return lambda: tensor.quantize(x, BLOCK)

