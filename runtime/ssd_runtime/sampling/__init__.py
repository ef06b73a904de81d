"""The choice of tokens from logits."""
