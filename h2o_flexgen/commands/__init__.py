"""Command lines: one file for each command of `h2o-flexgen`, and what they share."""
