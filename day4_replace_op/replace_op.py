# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One operator replaced: attention
# Baseline, Triton version, ThunderKittens version where there is one, profile, conclusion. This notebook is generated
# from `replace_op.py` (`jupytext --to ipynb replace_op.py`) and kept without outputs: run it on your machine.
# Without a GPU kernels are interpreted, sizes are small, and times are left out.

# %%
from lessonkit import DEVICE, device, specimen, timing

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import course_ops
from course_ops.testing import kernels
from workloads.gpt import GPU, TINY, Attention, CourseAttention, make, train

THUNDERKITTENS = "day3_matmul_tk.lesson15_thunderkittens_attention"
B, H, S, D = (8, 16, 2048, 128) if GPU else (1, 2, 64, 64)
DTYPE = torch.bfloat16 if GPU else torch.float32
torch.manual_seed(0)
q, k, v = (torch.randn(B, H, S, D, device=DEVICE).to(DTYPE) for _ in range(3))
print(f"{device.name()}: B={B} H={H} S={S} D={D} {DTYPE}, causal")

# %% [markdown]
# ## Baseline
# Written out, attention makes an S x S matrix for each head. The scores, the scaled scores, the masked scores and the
# weights are each written once and read once. That is HBM traffic of 8 S^2 elements, 2 S / D times the 4 S D elements
# of q, k, v and o. PyTorch's own operator does not write that matrix. Predict before you run on. How many bytes is the
# matrix here? How long would the traffic of 8 S^2 elements take at your machine's bandwidth?


# %%
def written_out(q, k, v):
    scores = q @ k.mT * D**-0.5
    return scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf).softmax(-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


exact = written_out(q.double(), k.double(), v.double())
error = {"written out": (written_out(q, k, v) - exact).abs().max(), "SDPA": (sdpa(q, k, v) - exact).abs().max()}
matrix, given = B * H * S * S * DTYPE.itemsize, 4 * q.nbytes
print(f"one crossing of the scores: {matrix / 1e6:.3g} MB; of q, k, v and o: {given / 1e6:.3g} MB")

# %% [markdown]
# ## Triton version
# `course_ops.attention`, whose kernels are this day's (lessons 4 to 10): a tile of queries walks over tiles of keys,
# scores stay on the chip, the backward computes them again. Its error against float64 may be twice PyTorch's, no more.
# Inside `kernels()` it runs its kernels without a GPU too, interpreted.


# %%
def triton_version(q, k, v):
    with kernels():
        return course_ops.attention(q, k, v, causal=True)


error["Triton"] = (triton_version(q, k, v) - exact).abs().max()
assert error["Triton"] <= 2 * max(error["written out"], error["SDPA"]) + 1e-6

leaves = [t.detach().requires_grad_() for t in (q, k, v)]
upstream = torch.randn_like(q)
with kernels():
    ours, theirs = (torch.autograd.grad(f(*leaves), leaves, upstream) for f in (triton_version, sdpa))
torch.testing.assert_close(ours, theirs, rtol=2e-2 if GPU else 1e-3, atol=2e-2 if GPU else 1e-4)
for name, e in error.items():
    print(f"{name:12} largest error {e.item():.2e}")

# %% [markdown]
# ## ThunderKittens version
# Day 3's lesson 15, in C++: it runs on a Hopper GPU with nvcc and the library's headers. It has a forward only.

# %%
versions = {"written out": written_out, "SDPA": sdpa, "Triton": triton_version}
program = specimen(THUNDERKITTENS, "kernels")
if why := program.lacks() or ("" if device.capability() == 90 else "it needs sm_90: a Hopper GPU"):
    print(f"left out: {why}")
else:
    attention_ahead = specimen(THUNDERKITTENS, "attention_ahead")
    versions["ThunderKittens"] = lambda q, k, v: attention_ahead(q, k, v, True)
    torch.testing.assert_close(versions["ThunderKittens"](q, k, v), sdpa(q, k, v), rtol=2e-2, atol=2e-2)

# %% [markdown]
# ## In the model
# The GPT of `workloads/gpt.py`, not edited: inside the `with` its attention modules are of another class. Same seed,
# same batches, same loss.

# %%
model = make(TINY)
with kernels(), course_ops.patch(model, (), {Attention: CourseAttention}) as patched:
    losses = train(model, TINY, steps=3)
torch.testing.assert_close(losses, train(make(TINY), TINY, steps=3), rtol=1e-2 if GPU else 1e-4, atol=0)
print(patched)
print("losses", [round(loss, 3) for loss in losses])

# %% [markdown]
# ## Profile
# Which kernels run, and for how long. On a CPU these are operators, and ours is Python that interprets a kernel.

# %%
activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * GPU
for name, version in versions.items():
    version(q, k, v)
    with profile(activities=activities) as seen:
        version(q, k, v)
        if GPU:
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA if GPU else torch.autograd.DeviceType.CPU
    calls = [e for e in seen.key_averages() if e.device_type == kind]
    calls.sort(key=lambda e: -(e.self_device_time_total if GPU else e.self_cpu_time_total))
    print(f"{name}: {sum(e.count for e in calls)} calls; the longest: {[e.key[:40] for e in calls[:3]]}")

# %% [markdown]
# ## Time
# Versions in turns (A B C A B C), medians, L2 flushed.

# %%
ms = {}
if GPU:
    times = timing.measure({name: lambda f=f: f(q, k, v) for name, f in versions.items()})
    ms = {name: t.p50 for name, t in times.items()}
    for name, t in ms.items():
        print(f"{name:15} {t:.3f} ms, {2 * B * H * S * S * D / t * 1e-9:.0f} TFLOP/s")
else:
    print("no GPU: an interpreter's time says nothing")

# %% [markdown]
# ## Conclusion
# Written out of what was measured above, on the machine that ran it.

# %%
worst = max(error, key=lambda name: error[name])
print(f"All versions agree; the largest error is that of {worst}, {error[worst].item():.1e}.")
if ms:
    flops, limits = 2 * B * H * S * S * D, timing.limits()  # half of 4 S^2 D: causal
    rate, fastest = flops / ms["Triton"] * 1e3, limits.matmul["bf16"]
    before, after, ridge = flops / (given + 8 * matrix), flops / given, fastest / limits.copy
    gain = {name: f"{ms[name] / ms['Triton']:.2f}" for name in ms}
    print(f"The Triton version's speed over the others': {gain}")
    print(f"FLOPs a byte: written out {before:.0f}, in tiles {after:.0f}; this machine's ridge is {ridge:.0f}.")
    print(f"It runs at {rate / fastest:.0%} of a matmul's rate. The rest is softmax between two matmuls: lesson 8.")
else:
    print("Right on this machine; how fast, say the rows of a GPU in reports/, or this notebook run on one.")
