"""The protocol over gRPC. It only translates."""
