"""Exit heads: fitted, trained on, and tuned for each domain."""
