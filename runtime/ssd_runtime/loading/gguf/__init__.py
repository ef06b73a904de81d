"""A `.gguf` file as a model: its configuration, its tokenizer, and its weights, dense or packed."""
