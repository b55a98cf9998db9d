"""The commands of `h2o-flexgen`, one file each, and what they share: options, budget, output and main."""
