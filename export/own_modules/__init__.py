"""Somebody's own PyTorch module as an ONNX graph. Needs torch."""
