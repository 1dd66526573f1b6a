"""dispatch and combine for torch.compile and autograd."""
