"""One pytest suite over every lesson: what to test is read off the lessons."""

import os

# Each worker has one core's worth of work; torch's own threads would only fight over it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers():
    """`-n auto`: a worker a core, and on a GPU no more than have 4 GiB of it each."""
    from lessonkit import device

    import torch

    cores = os.cpu_count() or 1
    return min(cores, max(1, torch.cuda.mem_get_info()[0] // 2**32)) if device.HAS_GPU else cores
