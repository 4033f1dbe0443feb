"""What can go wrong with a server."""

from headrace.records import EngineDown


class NotStarted(EngineDown):
    """A server did not come up."""
