"""Triton kernels. Importing one of the modules here imports triton, which is not a dependency: see usable()."""
