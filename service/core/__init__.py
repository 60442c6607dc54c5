"""Types, errors, settings, authentication and limits, known to every other package."""
