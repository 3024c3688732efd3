"""The version, in a file of its own so that packaging can read it without importing torch."""

__version__ = "0.1.0"
