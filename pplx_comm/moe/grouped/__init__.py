"""Grouped matrix products over the rows that dispatch writes, by several backends behind one interface."""
