"""What a machine has: clocks, memory, placement of tensors and their transfer."""
