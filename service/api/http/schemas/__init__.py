"""OpenAPI's descriptions of bodies that are read and written without pydantic, for speed."""
