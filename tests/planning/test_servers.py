"""Servers as queues, by worked numbers."""

from headrace.planning.rates import Rates
from headrace.planning.servers import Drawing, Server


def server(*, step: float, row: float, rows: int = 4) -> Server:
    return Server(Rates(decode_step=step, decode_row=row, train_token=0.0), rows)


def group() -> Drawing:
    return Drawing((), 0, 0)


def ends(queue: Server, count: int) -> list[float]:
    """Times at which the next ``count`` rows end."""
    times: list[float] = []
    while len(times) < count:
        time = queue.next_end(queue.clock)
        assert time is not None
        times += [time] * len(queue.take_ended(time))
    return times


def test_rows_slow_each_other_down() -> None:
    """Two rows of 10 and 20 tokens: 3 s a token for both, then 2 s a token for the one that is left: 10 x 3 = 30, 30 + 10 x 2 = 50."""
    queue = server(step=1.0, row=1.0)
    for length in (10, 20):
        queue.add(0.0, length, group())
    assert ends(queue, 2) == [30.0, 50.0]


def test_a_row_without_a_place_waits() -> None:
    """One place, rows of 5 and 7 tokens at 2 s each: 10, then 10 + 14."""
    queue = server(step=1.0, row=1.0, rows=1)
    for length in (5, 7):
        queue.add(0.0, length, group())
    assert ends(queue, 2) == [10.0, 24.0]


def test_a_stall_delays_every_row_once() -> None:
    queue = server(step=1.0, row=0.0)
    queue.add(0.0, 10, group())
    queue.stall(4.0, 3.0)
    assert ends(queue, 1) == [13.0]


def test_media_are_prepared_one_after_another() -> None:
    queue = server(step=1.0, row=0.0)
    assert [queue.prepare_media(0.0, 2.0), queue.prepare_media(1.0, 2.0), queue.prepare_media(9.0, 2.0)] == [2.0, 4.0, 11.0]


def test_cleared_caches_cost_each_prompt_once_and_every_drawn_token() -> None:
    """Two rows of one group after 4 tokens each, prompt 100: 108 tokens are read again."""
    queue, both = server(step=1.0, row=0.0), group()
    queue.add(0.0, 10, both)
    queue.add(0.0, 20, both)
    queue.advance(4.0)
    assert queue.context_tokens(100) == 108
