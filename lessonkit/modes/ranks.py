"""Run a function on several ranks at once: processes with a device each, which meet in a process group."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lessonkit.base import device

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

TIMEOUT = timedelta(seconds=300)  # a rank that waits longer than this for another raises, instead of hanging
# Imported once for all ranks. DDP imports dynamo, which asks after GPUs, and a CUDA that was asked cannot be forked.
PRELOAD = ["torch"] if device.HAS_GPU else ["torch._dynamo", "torch.distributed.fsdp"]
Work = Callable[[int, int, torch.device], Any]
LAUNCHED = "RANK" in os.environ  # by torch.distributed.run: this process is a rank already


def device_of(rank: int, world: int) -> torch.device:
    """A GPU of its own for each rank where there are enough: two NCCL ranks cannot share one. Otherwise the CPU."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world else torch.device("cpu")


def join(rank: int, world: int, rendezvous: str) -> torch.device:
    """Join the process group, with NCCL if each rank has a GPU of its own, else gloo; return the rank's device."""
    where, backend = device_of(rank, world), "gloo"
    if where.type == "cuda":
        torch.cuda.set_device(where)
        backend = "nccl"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=TIMEOUT)
    return where


def _rank(rank: int, world: int, folder: str, work: Work) -> None:
    """The life of one rank: meet the others, work, leave what it found, part."""
    torch.set_num_threads(1)  # each rank would otherwise take every core
    where = join(rank, world, f"file://{folder}/rendezvous")  # a file, not a port, which another run may hold
    torch.save(work(rank, world, where), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(work: Work, world: int = 2) -> list[Any]:
    """Run work(rank, world, device) on every rank at once; return what each returned, in order of rank.

    What it returns is saved by torch.save: tensors, numbers, lists of them. Raises TimeoutError after a minute without
    an end, and what a rank raises; the others are then ended.
    """
    if LAUNCHED:
        rank, world = dist.get_rank(), dist.get_world_size()
        found: list[Any] = [None] * world
        dist.all_gather_object(found, work(rank, world, device_of(rank, world)))
        return found
    # Ranks are forked from a server that has imported torch and done nothing else. That is faster than spawn, which
    # imports torch in every rank. It is safe, unlike fork, which copies this process with its threads, locks and CUDA
    # context.
    if device.FORKS:
        mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    start = "forkserver" if device.FORKS else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(_rank, (world, folder, work), world, join=False, start_method=start)
        try:
            # join raises, and ends the others, as soon as one rank has failed.
            if not any(ranks.join(timeout=TIMEOUT.total_seconds()) for _ in range(world)):
                raise TimeoutError(f"{work.__name__} did not end")
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]
