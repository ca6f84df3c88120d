"""Faster Diffusers and Transformers pipelines: record, tune, cache, share.

Importing this package patches nothing, and imports diffusers and transformers only when they are used.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("aitune-hf")
except PackageNotFoundError:  # Run from a checkout that is not installed.
    __version__ = "0.0.0"
