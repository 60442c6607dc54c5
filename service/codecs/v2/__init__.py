"""The Open Inference Protocol: JSON, binary tensors and protocol buffers."""
