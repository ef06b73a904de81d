"""Exit heads: fitting, and tuning per domain."""
