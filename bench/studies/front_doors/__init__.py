"""The front doors under load: `ssd-serve`, its clients, and `generate`."""
