"""The arithmetic: matmuls and attention, as plain functions of tensors."""
