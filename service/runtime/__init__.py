"""onnxruntime sessions, kernels, loaded models and the model repository."""
