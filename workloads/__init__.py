"""What the operators are used in: the GPT under study and its variants, models of transformers, training data.

Nothing here knows the kit or a lesson.
"""
