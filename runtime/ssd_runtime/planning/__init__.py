"""What to do next: plain decoding, or drafting with which mask, how far and until which confidence."""
