"""Kernels, packed weights and their precision."""
