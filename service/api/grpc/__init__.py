"""The door over gRPC. It only translates."""
