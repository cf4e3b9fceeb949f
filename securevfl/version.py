"""The version of securevfl."""

__version__ = "0.3.0"
