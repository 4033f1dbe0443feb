"""What can go wrong with a server."""


class EngineDown(RuntimeError):  # noqa: N818
    """A vLLM server died, hangs, or cannot do what is asked of it; the message names it."""


class NotStarted(EngineDown):
    """A server did not come up."""
