"""Measurements of the device: latency, memory, time."""
