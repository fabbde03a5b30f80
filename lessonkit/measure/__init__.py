"""How fast is it? Timing, rows, the code that a row is of, and counters of the GPU."""
