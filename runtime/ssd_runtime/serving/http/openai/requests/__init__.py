"""Requests of OpenAI's interface: their fields are checked, their messages and tools become a prompt."""
