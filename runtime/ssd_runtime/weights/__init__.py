"""Kernels that serve the projections."""
