"""Serves artifacts. It needs neither torch nor the rooms that export."""
