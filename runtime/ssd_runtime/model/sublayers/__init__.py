"""Runs the mixers and MLPs of all layers, by torch or in one call of our own code."""
