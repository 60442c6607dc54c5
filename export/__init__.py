"""From a front-end to a proven artifact in a repository."""
