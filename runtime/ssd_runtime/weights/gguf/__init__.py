"""The `.gguf` format: headers, tensors and the kernels of quantised weights."""
