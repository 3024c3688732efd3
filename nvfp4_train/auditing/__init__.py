"""The audit: proves from what was executed that a model trains as its recipe says, or names what is not so.

    procedure      nt.audit: the steps it runs and what it asks of them
    evidence       what each GEMM was handed, gathered while it ran        matmuls     products the library does not own
    expectations   what the recipe asks for, read anew                     coverage    shares of the step's FLOPs
    operands       is this operand the quantization of that tensor?        switches    SR, Hadamard, 2-D, other names
    chain_rule     does backward differentiate what forward computed?      statistics, sensitivity, monitor
"""

from nvfp4_train.auditing.findings import Audit, Finding
from nvfp4_train.auditing.procedure import audit

__all__ = ["Audit", "Finding", "audit"]
