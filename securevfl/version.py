"""The version of securevfl."""

__version__ = "0.2.0"
