"""Jobs from file to file: rows in, rows out."""
