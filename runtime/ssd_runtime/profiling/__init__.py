"""Measurements of the device: latency, memory and time."""
