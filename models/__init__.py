"""Front-ends as PyTorch modules, and how they are read from checkpoints."""
