"""Files, signals, progress bars: what any program needs, and nothing of models."""
