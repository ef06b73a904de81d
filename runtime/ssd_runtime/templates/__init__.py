"""Chat templates, which come from anybody: rendered in a process that can be ended."""
