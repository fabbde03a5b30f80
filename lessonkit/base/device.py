"""Which machine is this? Decided once, before anything imports Triton.

One lesson runs in three modes, and the device alone says which:

    cuda   run:         the kernel runs on the GPU
    cpu    interpreted: no GPU, so Triton's interpreter runs the kernel, one program after another
    meta   compiled:    tensors have shapes but no data, so a launch only compiles (lessonkit.modes.compiled)
"""

import os
import re
import sys
from typing import Any

from lessonkit.base import chips, libtriton

import torch

HAS_COMPILER = not libtriton.stand_in()  # Triton's
if not HAS_COMPILER:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # kernels are interpreted, whatever GPU is there
COMPILE_ONLY = os.environ.get("LESSONKIT_MODE") == "compiled"
HAS_GPU = torch.cuda.is_available() and not COMPILE_ONLY
DEVICE = torch.device("meta" if COMPILE_ONLY else "cuda" if HAS_GPU else "cpu")
INTERPRETED = DEVICE.type == "cpu"

# How processes start. On Windows there is no fork, and on macOS the system's libraries do not survive one.
FORKS = hasattr(os, "fork") and sys.platform != "darwin"

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
    """Compute capability that kernels are compiled for here: 90 for Hopper, 0 for AMD.

    Interpreted it is 90: the interpreter does what Hopper can.
    """
    target = 90 if INTERPRETED else _target()
    return 0 if isinstance(target, str) else target


def num_sms() -> int:
    """SMs to fill: the GPU's own count, when only compiling those of the target's card, 4 when interpreted."""
    if HAS_GPU:
        return torch.cuda.get_device_properties(0).multi_processor_count
    return chips.of(_target()).sms if COMPILE_ONLY else 4


def shared_memory() -> int:
    """Bytes of shared memory that a block may have: the GPU's or the target's card's, Hopper's when interpreted."""
    if not HAS_GPU:
        return chips.of(_target() if COMPILE_ONLY else 90).shared_block
    properties: Any = torch.cuda.get_device_properties(0)  # PyTorch's types leave the field out
    return int(properties.shared_memory_per_block_optin)


def roomy() -> bool:
    """Whether a block may have about as much shared memory as on Hopper, 227 KB, for which the large tiles are made."""
    return shared_memory() > 200_000


def fitting_stages(stages: int, bytes_a_stage: int, beside: int = 0) -> int:
    """The stages of a pipeline where its chip is roomy; elsewhere as many of them as fit, with `beside` bytes more."""
    return stages if roomy() else max(1, min(stages, (shared_memory() - 1024 - beside) // bytes_a_stage))


def _target() -> chips.Target:
    import triton

    return triton.runtime.driver.active.get_current_target().arch  # type: ignore[no-any-return]


def name() -> str:
    """The machine as a folder name under reports/: nvidia-h200, or cpu."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-") if HAS_GPU else "cpu"
