"""The arithmetic: matrix products and attention, as plain functions of tensors."""
