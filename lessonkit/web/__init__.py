"""The web edition: a static book in each language, generated from lessons, rows, guides and catalogues."""

from lessonkit.base.words import NAMES

LANGUAGES = NAMES  # those of the book
