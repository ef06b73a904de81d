"""Exit heads: fitting, training, and tuning per domain."""
