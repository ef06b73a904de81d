"""The machine: clocks, memory, placement of tensors and their transfer."""
