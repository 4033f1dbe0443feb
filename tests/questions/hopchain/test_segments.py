"""Scenes to shots."""

import pytest

from headrace.questions.hopchain import segment_shots

CASES = [
    ([(0, 1), (1, 3.5), (3.5, 27)], [(0, 3.5), (3.5, 11.33), (11.33, 19.17), (19.17, 27)]),
    ([(0, 10), (10, 20)], [(0, 10), (10, 20)]),
    ([(0, 20)], [(0, 6.67), (6.67, 13.33), (13.33, 20)]),
    ([(0, 1.5), (1.5, 11), (11, 14)], [(0, 11), (11, 14)]),
    ([(0, 5), (5, 6.2)], [(0, 6.2)]),
    ([(0, 1.9), (1.9, 11.9), (11.9, 13.8)], [(0, 13.8)]),
    ([(0, 1.2)], [(0, 1.2)]),
]


@pytest.mark.parametrize(("scenes", "shots"), CASES)
def test_ex_1_4(scenes: list[tuple[float, float]], shots: list[tuple[float, float]]) -> None:
    assert segment_shots(scenes) == shots


def test_ex_1_4_a_video_without_a_cut_is_split_evenly() -> None:
    shots = segment_shots([], 185.0)
    assert len(shots) == 19
    assert shots[0] == (0, 9.74)
    assert shots[-1][1] == 185.0


def test_shots_cover_the_video_without_gaps() -> None:
    shots = segment_shots([(0, 0.5), (0.5, 33), (33, 34.9), (34.9, 61.2), (61.2, 61.9)])
    assert [end for _, end in shots[:-1]] == [start for start, _ in shots[1:]]
    assert (shots[0][0], shots[-1][1]) == (0, 61.9)
    assert all(end - start >= 2 for start, end in shots)


def test_strict_max_cuts_again_what_merging_made_long() -> None:
    assert segment_shots([(0, 1.9), (1.9, 11.9), (11.9, 13.8)], strict_max=True) == [(0, 6.9), (6.9, 13.8)]


@pytest.mark.parametrize("duration", [None, 0.0, -1.0])
def test_neither_scenes_nor_length_is_refused(duration: float | None) -> None:
    with pytest.raises(ValueError, match="expected the video's duration"):
        segment_shots([], duration)
