"""Hostile clients, broken machines and long runs; docs/reliability.md has the results."""
