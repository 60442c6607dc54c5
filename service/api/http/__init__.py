"""HTTP and WebSocket: routes, status codes, headers, streaming."""
