"""What differs between model families, and what a model's config says of its layers."""
