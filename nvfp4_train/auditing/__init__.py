"""The audit: proves from what was executed that a model trains as its recipe says, or names what is not so.

    procedure     nt.audit: the steps it runs and what it asks of them        steps     leaves all as it was found
    evidence      what each GEMM was handed, gathered while it ran            matmuls   products that are not ours
    expectations  what the recipe asks for, read anew                         who_ran   and what ran in high precision
    origins       the tensor each operand should come from                    coverage  shares of the step's FLOPs
    operands      is this operand the quantization of that tensor?            scale_rules, choices
    switches      SR, Hadamard, 2-D, 4/6; other names for what went wrong
    chain_rule, gradients    does backward differentiate what forward computed?
    statistics    of the operands      sensitivity  layer by layer            meters, trends  along training
"""

from nvfp4_train.auditing.findings import Audit, Finding
from nvfp4_train.auditing.procedure import audit

__all__ = ["Audit", "Finding", "audit"]
