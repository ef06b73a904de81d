"""Bundles that travel."""
