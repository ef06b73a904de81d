"""Devices that parts of a model run on, and transfers to them."""
