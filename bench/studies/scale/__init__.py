"""What several replicas and several workers bring, measured here and projected."""
