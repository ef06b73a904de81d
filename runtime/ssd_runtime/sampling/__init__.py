"""The choice of tokens by logits."""
