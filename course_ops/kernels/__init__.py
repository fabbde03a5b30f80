"""Kernels and the host functions that launch them. They check nothing that the operator has checked."""
