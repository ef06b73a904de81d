"""The offline compiler: measures, calibrates, searches, validates, and writes a bundle."""
