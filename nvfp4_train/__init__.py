"""NVFP4 pretraining: quantized linear layers, recipes, and evidence that they ran as claimed."""

from nvfp4_train.conversion import ConversionReport, bf16_forward, convert, set_progress
from nvfp4_train.gemm import matmul
from nvfp4_train.indexer import Attention, LightningIndexer, indexer_kl
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_mqa_logits_at, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import mqa_operand, paged_cache
from nvfp4_train.quantization import QuantizedTensor, quantize
from nvfp4_train.recipe import OperandSpec, Recipe, load_recipe
from nvfp4_train.version import __version__

__all__ = [
    "Attention",
    "ConversionReport",
    "LightningIndexer",
    "OperandSpec",
    "QuantizedLinear",
    "QuantizedTensor",
    "Recipe",
    "__version__",
    "bf16_forward",
    "convert",
    "fp4_mqa_logits",
    "fp4_mqa_logits_at",
    "fp4_paged_mqa_logits",
    "indexer_kl",
    "load_recipe",
    "matmul",
    "mqa_operand",
    "paged_cache",
    "quantize",
    "set_progress",
]
