"""The ONNX files of an artifact, as far as they are read without onnxruntime."""
