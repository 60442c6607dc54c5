"""Incipit: the part of a transformer that comes before its first block."""

__version__ = "0.1.0"
