"""What the H2O paper says of attention (arXiv 2306.14048, section 3 and appendix), measured on any model and text: one
subject a file. `study.py` runs them all, `plot.py` draws what it finds."""
