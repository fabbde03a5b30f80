"""The ways to run a kernel of Triton: interpreted, compiled for a GPU that is not here."""
