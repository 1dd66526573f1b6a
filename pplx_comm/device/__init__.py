"""The phases of an AllToAll on CPU tensors and on GPUs."""
