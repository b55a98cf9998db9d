"""Measures this machine for the policy search, with the engine's own functions."""
