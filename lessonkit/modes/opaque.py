"""A copy that the compiler cannot see through: the one device function that lessons share."""

from lessonkit.base import device

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(device.INTERPRETED)


@triton.jit
def opaque(x):  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    """An opaque copy of x: to the compiler a new value, as if it had been read from memory anew.

    A row that is used twice stays in registers in between, and the compiler keeps what it computed from it last: its
    fp32 image, 32 bits an element. To the compiler this empty instruction makes a new x, so what stays is the 16 bits
    that were loaded, and widening them again costs one instruction. Half the registers are twice the row or twice the
    programs on an SM. For 16-bit tensors with an even number of elements a thread; others are returned as they are.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
