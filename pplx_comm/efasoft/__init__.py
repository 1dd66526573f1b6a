"""A software EFA device under libfabric's own efa provider: the launcher. The device itself is proxy/efasoft, in C.

Standard library only, and nothing of the rest of the package but its errors: a command is run within a few hundredths of a second.
"""
