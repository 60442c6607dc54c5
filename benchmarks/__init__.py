"""Measurements that take too long, or too much memory, for a test."""
