"""Tiers: where weights, KV cache and activations are, and how they move. Knows no model."""
