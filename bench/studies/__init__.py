"""What else was measured, one question per file."""
