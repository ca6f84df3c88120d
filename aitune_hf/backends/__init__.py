"""Backends: what turns a graph into something faster. Reached by name, through :mod:`.registry`."""
