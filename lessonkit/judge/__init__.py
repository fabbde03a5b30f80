"""Is a kernel right? Checks against PyTorch, mutants, the questions that tests ask, and which verdicts are kept."""
