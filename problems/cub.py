"""CUB's sum and scans as peers, for problems/sum.py and problems/scan.py. nvcc builds cub.cu at the first call.

x [n], fp32 and contiguous -> its sum [], or its prefix sums [n]. Without a GPU or without nvcc the peer is absent. What
CUB needs as scratch is asked once for each n, and allocated in each call.
"""

from functools import cache

from lessonkit import DEVICE, Unsupported, cuda

import torch

kernels = cuda.extension(__file__)  # cub.cu


def cub_sum(x):
    """cub::DeviceReduce::Sum."""
    return _call("sum", x, ())


def cub_scan(x):
    """cub::DeviceScan::InclusiveSum."""
    return _call("scan", x, x.shape)


def cub_scan_reversed(x):
    """cub::DeviceScan::InclusiveSum with iterators that walk from the last element to the first."""
    return _call("scan_reversed", x, x.shape)


def _call(name, x, shape):
    if DEVICE.type != "cuda":
        raise ImportError("CUB needs nvcc and a GPU")
    if why := _lacks():
        raise ImportError(f"CUB is C++: {why}")
    if x.dtype != torch.float32:
        raise Unsupported(f"CUB is built for fp32 here, not for {x.dtype}")
    scratch, y = x.new_empty(_scratch(name, x.numel()), dtype=torch.uint8), x.new_empty(shape)
    getattr(kernels, name)(x, y, scratch, scratch.numel(), x.numel())
    return y


@cache
def _lacks():
    return kernels.lacks()


@cache
def _scratch(name, n):
    return max(getattr(kernels, f"{name}_scratch")(n), 1)  # a null pointer would ask for the size again
