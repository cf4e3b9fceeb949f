"""The version of securevfl."""

__version__ = "0.4.0"
