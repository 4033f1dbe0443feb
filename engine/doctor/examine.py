"""Everything that is checked, in order."""

from collections.abc import Iterator

from headrace.config import Config
from headrace.doctor.check import Check
from headrace.doctor.machine import machine
from headrace.doctor.model import configured
from headrace.doctor.software import software


def examine(config: Config | None) -> Iterator[Check]:
    """The machine, the software, and what a configuration asks of both; each line as soon as it is known."""
    yield from machine(config)
    yield from software(config)
    if config is not None:
        yield from configured(config)
