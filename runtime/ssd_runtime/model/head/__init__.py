"""From states to logits."""
