"""The operators that the course ends in: general, fast, and usable without the course.

Every operator is a torch.library operator with a fake, so that torch.compile sees it. It has a backward, unless its
docstring says otherwise, and matmuls and attention have their FLOPs. CUDA tensors are computed by kernels, CPU tensors
by PyTorch. Importing compiles nothing.
"""

from course_ops._common import Unsupported
from course_ops.add_norm import add_norm
from course_ops.attention import attention, attention_backward, attention_forward
from course_ops.attention_paged import attention_paged
from course_ops.attention_varlen import attention_varlen
from course_ops.cross_entropy import cross_entropy
from course_ops.dropout import dropout
from course_ops.gelu import gelu
from course_ops.grouped_matmul import grouped_matmul
from course_ops.layer_norm import layer_norm
from course_ops.linear import linear
from course_ops.linear_cross_entropy import linear_cross_entropy
from course_ops.matmul import matmul
from course_ops.matmul_fp8 import matmul_fp8
from course_ops.patch import patch
from course_ops.quantize import quantize
from course_ops.rms_norm import rms_norm
from course_ops.scan import scan
from course_ops.softmax import softmax

__version__ = "0.1.0"  # of the course, too: pyproject.toml

__all__ = [
    "Unsupported",
    "add_norm",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_paged",
    "attention_varlen",
    "cross_entropy",
    "dropout",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "matmul_fp8",
    "patch",
    "quantize",
    "rms_norm",
    "scan",
    "softmax",
]
