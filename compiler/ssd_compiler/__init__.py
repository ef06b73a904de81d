"""What decides offline: measure, calibrate, search, index, validate, write."""
