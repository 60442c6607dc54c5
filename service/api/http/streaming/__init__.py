"""Decode sessions over WebSocket, NDJSON and server-sent events."""
