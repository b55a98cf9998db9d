"""Tiers: where bytes live and how they move. Knows nothing of transformers or of any model's maths."""
