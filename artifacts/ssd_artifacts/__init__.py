"""The bundle format, model fingerprints and integrity checks: everything that travels between machines."""
