"""OpenAI's HTTP interface: what clients send, what they are refused, and what they get back."""
