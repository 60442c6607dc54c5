"""Soak test: many clients of every protocol over breaking connections, with a check of every bit and of memory."""
