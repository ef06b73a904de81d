"""The user's own model as sub-layers, and the cache that they share."""
