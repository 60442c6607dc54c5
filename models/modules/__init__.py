"""PyTorch modules: tokens, positions, attention biases, stems."""
