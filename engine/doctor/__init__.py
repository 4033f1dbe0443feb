"""``headrace doctor``: what a machine has, what a run needs of it, and what to do where the two do not meet."""
