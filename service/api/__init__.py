"""The protocols over HTTP and WebSocket. They only translate."""
