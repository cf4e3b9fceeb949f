"""The version of securevfl."""

__version__ = "0.1.0"
