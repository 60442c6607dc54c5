"""Formats: JSON, bytes, frames. No network and no model."""
