"""From finished cells to numbers a reader can trust: frames, statistics, tables, figures, pages."""
