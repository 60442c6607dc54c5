"""What a hostile client, a broken machine or a long time does to the service: docs/reliability.md."""
