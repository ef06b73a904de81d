"""Connections of clients: their bodies, limits and origins, and clients that leave."""
