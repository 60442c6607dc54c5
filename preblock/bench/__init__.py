"""A load generator for servers: each connection sends one request after another."""
