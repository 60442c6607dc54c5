"""Clients for environments of their own; each prints its findings as JSON."""
