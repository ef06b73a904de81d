"""The search for a domain's masks."""
