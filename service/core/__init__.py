"""Types, errors, settings, authentication and memory of bodies, known to every other package."""
