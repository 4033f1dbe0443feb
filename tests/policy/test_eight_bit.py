"""AdamW with 8-bit moments: a quarter of their memory, nearly the same steps, the same bits after a resume."""

import builtins

import pytest
import torch

from headrace import checkpoint
from headrace.config import ConfigError
from tests.policy.learner_cases import make_config, make_learner, random_batch, tiny_model

pytest.importorskip("torchao.optim")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=64)  # matrices of 4,096 and more values, which are packed


def config_of(directory, **sections):
    return make_config(directory, optimizer={"moments": "8bit"}, **sections)


def moment_bytes(learner):
    """Bytes of all moments of matrices, as they are stored."""
    total = 0
    for entry in learner.optimizer.state_dict().values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = entry[name]
            if moment.ndim > 1:
                total += moment.codes.nbytes + moment.scale.nbytes if hasattr(moment, "codes") else moment.nbytes
    return total


def test_moments_take_a_quarter(model):
    eight, full = make_learner(config_of(model)), make_learner(make_config(model))
    assert moment_bytes(eight) == pytest.approx(moment_bytes(full) / 4, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_steps_nearly_as_in_full_precision(model, dtype):
    """Ten steps from the same start: 8-bit rounding of the moments turns the way by a few per cent, no more."""
    learners = [make_learner(make(model, model={"dtype": dtype})) for make in (config_of, make_config)]
    start = {name: master.detach().clone() for name, master in learners[0].optimizer.masters.items()}
    for seed in range(10):
        for learner in learners:
            learner.update(random_batch(seed, learner.config.loss))
    ways = [torch.cat([(m.detach() - start[n]).flatten() for n, m in learner.optimizer.masters.items()]) for learner in learners]
    assert torch.cosine_similarity(*ways, dim=0) > 0.97
    assert ways[0].norm() == pytest.approx(float(ways[1].norm()), rel=0.05)
    assert not torch.equal(*ways)


def test_the_configured_rate_reaches_it(model):
    """Warm-up: the first step has half of the second's rate, as AdamW's first steps of a constant gradient show."""
    learner = make_learner(config_of(model))
    batch = random_batch(0, learner.config.loss)
    before = {name: master.detach().clone() for name, master in learner.optimizer.masters.items()}
    learner.update(batch)
    largest = max(float((master.detach() - before[name]).abs().max()) for name, master in learner.optimizer.masters.items())
    assert largest == pytest.approx(1e-2 / 2, rel=0.05)


def test_a_resumed_run_repeats_to_the_bit(model, tmp_path):
    config = config_of(model)
    whole, first, second = (make_learner(config) for _ in range(3))
    for seed in range(4):
        whole.update(random_batch(seed, config.loss))
    for seed in range(2):
        first.update(random_batch(seed, config.loss))
    checkpoint.save(tmp_path, 2, first, {})
    checkpoint.restore(tmp_path, second)
    for seed in (2, 3):
        second.update(random_batch(seed, config.loss))
    assert all(map(torch.equal, whole.policy.parameters(), second.policy.parameters()))


def test_without_torchao_the_message_says_how(model, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name == "torchao.optim":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"^optimizer.moments = 8bit needs the package torchao: pip install 'headrace\[scale\]'$"):
        make_learner(config_of(model))
