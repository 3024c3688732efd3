"""NVFP4 pretraining: quantized linear layers, recipes, and evidence that they ran as claimed."""

from nvfp4_train.auditing import Audit, audit
from nvfp4_train.conditions import grad_to_noise
from nvfp4_train.conversion import ConversionReport, bf16_forward, convert, set_progress
from nvfp4_train.experts import QuantizedExperts
from nvfp4_train.exporting.loading import load_exported
from nvfp4_train.exporting.writing import export
from nvfp4_train.gemm import matmul
from nvfp4_train.indexer import Attention, LightningIndexer, indexer_kl
from nvfp4_train.layer_state import load_quantizer_state, quantizer_state
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_mqa_logits_at, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import mqa_operand, paged_cache
from nvfp4_train.oscillation import after_optimizer_step
from nvfp4_train.quantization import QuantizedTensor, quantize
from nvfp4_train.recipe import OperandSpec, Recipe, load_recipe
from nvfp4_train.sharding import same_on_all_ranks
from nvfp4_train.version import __version__
from nvfp4_train.weight_cache import cached_weights
from nvfp4_train.weight_gather import gather_in_fp4

__all__ = [
    "Attention",
    "Audit",
    "ConversionReport",
    "LightningIndexer",
    "OperandSpec",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuantizedTensor",
    "Recipe",
    "__version__",
    "after_optimizer_step",
    "audit",
    "bf16_forward",
    "cached_weights",
    "convert",
    "export",
    "fp4_mqa_logits",
    "fp4_mqa_logits_at",
    "fp4_paged_mqa_logits",
    "gather_in_fp4",
    "grad_to_noise",
    "indexer_kl",
    "load_exported",
    "load_quantizer_state",
    "load_recipe",
    "matmul",
    "mqa_operand",
    "paged_cache",
    "quantize",
    "same_on_all_ranks",
    "quantizer_state",
    "set_progress",
]
