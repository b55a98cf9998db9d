"""The H2O paper's observations on attention (arXiv 2306.14048, section 3 and appendix), for any model and text: one
subject per file. `study.py` runs them all, `plot.py` plots the results."""
