"""device="cuda" under the clock: the library, the floor, and the peers."""
