"""Reading published checkpoints: families, tensors, configurations."""
