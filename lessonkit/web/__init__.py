"""The web edition: a static book in each language, generated from lessons, rows, guides and catalogues."""
