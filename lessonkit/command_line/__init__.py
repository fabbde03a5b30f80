"""The commands of `python -m lessonkit`, each with its words, arguments and exit code."""
