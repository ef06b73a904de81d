"""Benchmarks and their fixtures; not installed."""
