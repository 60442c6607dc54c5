"""The protocols over HTTP, WebSocket and gRPC. They only translate."""
