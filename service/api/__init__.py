"""The doors over HTTP and WebSocket. They only translate."""
