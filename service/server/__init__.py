"""Processes and connections."""
