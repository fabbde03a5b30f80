"""CUDA C++: find the compilers, build a .cu for a GPU or for the emulator, call it, read its machine code."""

from lessonkit.base.errors import Fault
from lessonkit.cuda.extension import Extension, extension, together

__all__ = ["Extension", "Fault", "extension", "together"]
