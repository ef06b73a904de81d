"""A checkpoint in a folder as a model: its settings, its tensors, and its weights, wide or as they are stored."""
