"""Kernels for the projections."""
