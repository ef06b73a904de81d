"""Domains and their prompts: reading, clustering, splitting."""
