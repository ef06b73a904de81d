"""Planners decide cycle by cycle: plain decoding, or drafting with which mask, how far and until which confidence."""
