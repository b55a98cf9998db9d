"""The maths of each architecture as pure functions of (weights, tensors)."""
