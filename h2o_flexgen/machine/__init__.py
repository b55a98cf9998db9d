"""The machine that a job runs on: its memory, its compute device, and the rates it was measured to have."""
