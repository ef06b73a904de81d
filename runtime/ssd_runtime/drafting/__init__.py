"""Drafters, which propose tokens for the full model to verify."""
