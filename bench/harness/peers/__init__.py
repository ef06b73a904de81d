"""Other tools that decode the same prompts with the same weights."""
