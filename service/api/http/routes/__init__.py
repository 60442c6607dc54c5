"""One module for each group of URLs."""
