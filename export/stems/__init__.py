"""Stems as ONNX graphs: the patch embeddings of images and spectrograms. Needs torch."""
