"""Other front doors of the engine: HTTP, transformers' `generate`, a chat, and the recorder of real prompts."""
