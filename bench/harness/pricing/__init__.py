"""Decoding whose time is priced by a latency table."""
