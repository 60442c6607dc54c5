"""A load generator for a server of one's own: so many connections ask, each as soon as it was answered."""
