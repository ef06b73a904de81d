"""Checks of a loaded model against its reference."""
