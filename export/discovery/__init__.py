"""Discovery of front-ends without a row in the family table, from the model classes of an installed transformers."""
