"""Clients that need an environment of their own; each prints as JSON what it found."""
