"""A view of the user's own model as sub-layers, and its caches."""
