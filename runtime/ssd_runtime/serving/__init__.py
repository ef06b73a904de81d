"""Other front doors of the engine: transformers' `generate`, the recorder of real prompts."""
