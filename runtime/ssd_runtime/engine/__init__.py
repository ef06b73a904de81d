"""Engine, the decode loop and what it reports."""
