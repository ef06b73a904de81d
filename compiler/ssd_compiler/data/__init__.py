"""Domains and their prompts: read, found by clustering, split."""
