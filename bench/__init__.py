"""The comparison with other systems: rows, systems, results, tables."""
