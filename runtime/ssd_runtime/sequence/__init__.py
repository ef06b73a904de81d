"""Sequences: sessions, their prompts and the prefix cache."""
