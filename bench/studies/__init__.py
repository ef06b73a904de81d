"""Other measurements, one question per file."""
