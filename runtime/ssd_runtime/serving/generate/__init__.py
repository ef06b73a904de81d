"""Self-speculation inside transformers' own `generate`."""
