"""Files, signals and progress bars; knows nothing about models."""
