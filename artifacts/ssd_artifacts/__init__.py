"""What travels between machines: the bundle's format, model fingerprints, integrity."""
