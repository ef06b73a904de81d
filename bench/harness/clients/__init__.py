"""Clients of a server under measurement."""
