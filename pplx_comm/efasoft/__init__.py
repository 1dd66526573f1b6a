"""A software EFA device under libfabric's own efa provider: the launcher. The device itself is proxy/efasoft, in C.

Standard library only, and of the package only settings and errors: a command starts within a few hundredths of a second.
"""
