"""The engine: validates, plans, batches and runs requests, and keeps decode streams."""
