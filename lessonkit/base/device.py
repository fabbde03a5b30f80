"""Which machine is this? Decided once, before anything imports Triton.

One lesson runs in three modes, and the device alone says which:

    cuda   run:         the kernel runs on the GPU
    cpu    interpreted: no GPU, so Triton's interpreter runs the kernel, one program after another
    meta   compiled:    tensors have shapes but no data, so a launch only compiles (lessonkit.modes.compiled)
"""

import os
from typing import Any

import torch

COMPILE_ONLY = os.environ.get("LESSONKIT_MODE") == "compiled"
HAS_GPU = torch.cuda.is_available() and not COMPILE_ONLY
DEVICE = torch.device("meta" if COMPILE_ONLY else "cuda" if HAS_GPU else "cpu")
INTERPRETED = DEVICE.type == "cpu"

# Triton reads this while it is being imported (tl.max and friends are jitted then), so it has to be
# settled here, and a lesson imports lessonkit before triton.
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)


def capability() -> int:
    """Compute capability as one number (90 for Hopper), or 0 without a GPU."""
    if not HAS_GPU:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def architecture() -> int:
    """What kernels are compiled for here: 90 for Hopper; and when interpreted, which does what Hopper can."""
    if INTERPRETED:
        return 90
    import triton

    return int(triton.runtime.driver.active.get_current_target().arch)


def num_sms() -> int:
    """Streaming multiprocessors to fill: the GPU's own count, an H200's when only compiling, 4 when interpreted."""
    if HAS_GPU:
        return torch.cuda.get_device_properties(0).multi_processor_count
    return 132 if COMPILE_ONLY else 4


def shared_memory() -> int:
    """Bytes of shared memory that a block may have; Hopper's 227 KB where there is no GPU."""
    if not HAS_GPU:
        return 232448
    properties: Any = torch.cuda.get_device_properties(0)  # PyTorch's types leave the field out
    return int(properties.shared_memory_per_block_optin)


def name() -> str:
    """The machine as a folder name under reports/: nvidia-h200, or cpu."""
    return torch.cuda.get_device_name(0).lower().replace(" ", "-") if HAS_GPU else "cpu"
