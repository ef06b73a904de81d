"""Kernels that multiply rows by one weight in a layout of their own, one file each."""
