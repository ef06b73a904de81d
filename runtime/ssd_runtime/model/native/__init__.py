"""Sub-layers in our own code."""
