"""NVFP4 pretraining: quantized linear layers, recipes, and evidence that they ran as claimed."""

from nvfp4_train.conversion import ConversionReport, bf16_forward, convert, set_progress
from nvfp4_train.gemm import matmul
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.quantization import QuantizedTensor, quantize
from nvfp4_train.recipe import OperandSpec, Recipe, load_recipe
from nvfp4_train.version import __version__

__all__ = [
    "ConversionReport",
    "OperandSpec",
    "QuantizedLinear",
    "QuantizedTensor",
    "Recipe",
    "__version__",
    "bf16_forward",
    "convert",
    "load_recipe",
    "matmul",
    "quantize",
    "set_progress",
]
