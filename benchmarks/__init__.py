"""Measurements too long, or too large, for a test."""
