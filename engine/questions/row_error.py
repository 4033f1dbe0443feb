"""Why a row cannot be used."""


class RowError(ValueError):
    """One row is at fault; the message is ``field: what is wrong and what is expected``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.reason = field.split("[")[0].split(".")[0]
        """Field the row is counted under."""
