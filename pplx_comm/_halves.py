"""Which halves of a dispatch or a combine a call does; the numbers of the C++ side."""

SEND, RECV = 1, 2
BOTH = SEND | RECV
