"""The web edition: a static book in each language, generated from lessons, rows, guides and catalogues."""

LANGUAGES = {"en": "English", "zh": "简体中文"}
