"""Searches for masks, which the compiler and online planners share."""
