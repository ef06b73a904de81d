"""Anchors: the prompts that represent a domain, and the similarity threshold of routing."""
