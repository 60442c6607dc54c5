"""What OpenAPI tells of bodies that are read and written without pydantic, for speed."""
