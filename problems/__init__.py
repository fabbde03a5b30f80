"""What is asked of each operator, once: reference, inputs, shapes that hurt, least work, peers, properties, refusals.

A lesson, a CUDA program, an exercise and `course_ops` answer the same problem. A module here imports the kit and no
lesson; it binds `PROBLEM`, and `PROBLEM_BACKWARD` where the gradient is asked for too. `operators` says how
`course_ops` answers them, `zoo` at which shapes it is timed.
"""
