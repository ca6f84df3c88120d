"""The version of this package, from the metadata of its installation."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("aitune-hf")
except PackageNotFoundError:  # Run from a checkout that is not installed.
    __version__ = "0.0.0"
