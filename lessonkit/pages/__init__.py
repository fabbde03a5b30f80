"""What is generated from rows and lessons: reports, plots, paths."""
