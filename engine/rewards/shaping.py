"""Length shaping of rewards."""


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO): 0 up to ``max_length - buffer`` tokens, then linear to -1 at ``max_length``, -1 beyond."""
    return 0.0 - min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
