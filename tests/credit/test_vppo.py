"""Visual dependency, token selection and trajectory scale: EX-7.1 and EX-7.2."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.credit.vppo import dependency, select_tokens, trajectory_scale


def test_ex_7_1_dependency_and_its_tokens() -> None:
    scores = dependency([-0.2, -1, -0.3, -2, -0.1], [-0.25, -2.5, -0.3, -1.2, -0.6])
    np.testing.assert_allclose(scores, [0.001229, 0.723130, 0, 0.425541, 0.106531], atol=5e-7)
    assert select_tokens(scores).nonzero()[0].tolist() == [1, 3]


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (3, 2), (5, 2), (10, 4), (100, 40)])
def test_ex_7_1_tokens_kept(length: int, count: int) -> None:
    assert select_tokens(np.zeros(length)).nonzero()[0].tolist() == list(range(count))


def test_dependency_is_bounded() -> None:
    assert dependency([-50, 0], [0, -50]).tolist() == [10, 10]


def test_ex_7_2_trajectory_scale() -> None:
    np.testing.assert_allclose(trajectory_scale([0.1, 0.3, 0.5, 0.2]), [0.9, 1.014286, 1.128571, 0.957143], atol=5e-7)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_scales_have_mean_one(means: list[float]) -> None:
    scales = trajectory_scale(means)
    assert scales.mean() == pytest.approx(1, abs=1e-6)
    assert scales.min() >= 0.9
