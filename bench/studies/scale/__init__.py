"""Studies of several replicas and several workers, measured here and projected."""
