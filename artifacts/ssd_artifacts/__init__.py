"""What travels between machines: the bundle format, model fingerprints and integrity checks."""
