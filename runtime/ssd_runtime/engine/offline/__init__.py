"""Offline inference: files of prompts, one after the other or several at once, and their results."""
