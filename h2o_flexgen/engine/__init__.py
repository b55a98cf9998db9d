"""Runs a block: the schedule, and the step that joins weights, cache and maths."""
