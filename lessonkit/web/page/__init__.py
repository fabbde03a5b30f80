"""The exercises of day 2 in a page without a server: what Pyodide lacks for the course's own grader."""
