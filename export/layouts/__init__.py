"""Layouts: the token lookup of an artifact in the files of other engines, one module for each."""
