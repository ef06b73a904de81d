"""Loads models from the Hub, folders, GGUF files and the demo wheel."""
