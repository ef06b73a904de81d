"""Anchors: which prompts represent a domain, and from which similarity on a prompt belongs to one."""
