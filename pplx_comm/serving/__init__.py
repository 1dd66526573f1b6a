"""Plug-ins of serving engines. Each is found by the engine itself, and does nothing until it is asked for."""
