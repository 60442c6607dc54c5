"""OpenAPI descriptions of bodies. For speed, the codecs read and write most bodies without pydantic."""
