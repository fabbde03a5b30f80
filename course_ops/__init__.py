"""The operators that the course ends in: general, fast, and usable without the course.

Every operator is a torch.library operator with a fake, a backward and its FLOPs, so that autograd, torch.compile and
FLOP counters see it. CUDA tensors are computed by kernels, CPU tensors by PyTorch. Importing compiles nothing.
"""

from course_ops._common import Unsupported
from course_ops.attention import attention, attention_backward, attention_forward

__all__ = ["Unsupported", "attention", "attention_backward", "attention_forward"]
