"""Artifacts on disk: schemas, hashes, and checks of ONNX files without onnxruntime."""
