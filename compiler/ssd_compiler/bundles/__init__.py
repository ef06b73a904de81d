"""The command `ssd-bundle`: it shows bundles, carries them to other machines and fits them to other models."""
