"""Request context, timing, metrics, logs and tracing. No web framework."""
