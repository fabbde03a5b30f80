"""What `python -m lessonkit` does, and what it prints."""
