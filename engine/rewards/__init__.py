"""What a response earns: extraction, verification, shaping, the worker pool."""
