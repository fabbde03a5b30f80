"""The ways to run a lesson: interpreted, compiled for a GPU that is not here, on several ranks."""
