"""Carries bundles between machines: references, archives, the Hub, registries, signatures and privacy."""
