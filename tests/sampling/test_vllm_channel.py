"""What the mask says through two spare vocabulary rows, and who may ask it. Nothing here starts vLLM."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.kernels import top_token_mask
from headrace.records import SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.vllm.channel import decode, encode, read_settings, request_arguments, spare_rows, write_settings
from headrace.sampling.vllm.mask import load_settings
from tests.sampling.tiny_policy import Tiny

NATS = 6e-5


def sent(logits: torch.Tensor, eligible: torch.Tensor, inside: torch.Tensor, heat: float, rows: tuple[int, int]) -> np.ndarray:
    """[B, V] log-probs as an engine at temperature ``heat`` returns them after mask and report.

    Its softmax is exact here: torch's own on a CPU is wrong by up to 1e-4 nat at 151,936 columns, whatever is in them.
    """
    logits = logits.clone()
    mask = top_token_mask(logits, eligible, 0.95, banned=rows)
    everyone = torch.ones(len(logits), dtype=torch.bool)
    encode(logits, mask, inside, everyone, None if heat == 1 else torch.full((len(logits),), heat), torch.tensor(rows))
    return (logits / heat).double().log_softmax(-1).float().numpy()


@pytest.mark.parametrize("heat", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("size", [80, 151_936])
def test_the_channel_is_exact_where_almost_nothing_is_left(heat: float, size: int) -> None:
    """1 - p* from 0.5 down to e-21, at both vocabulary sizes, to 6e-5 nat; flags, spans and ids without error."""
    count = 60 if size < 1000 else 24
    rows = (size - 2, size - 1)
    logits = torch.randn(count, size, generator=torch.Generator().manual_seed(0))
    tops = torch.linspace(0, size - 3, count).long()
    rest = torch.linspace(float(np.log(0.5)), float(np.log(1e-21)), count)
    exact = logits.double().scatter(1, tops[:, None], -torch.inf)
    exact[:, list(rows)] = -torch.inf
    logits[torch.arange(count), tops] = (exact.logsumexp(1) - rest.double() + torch.log1p(-rest.double().exp())).float()
    logits[:, list(rows)] = 30.0  # whatever the head says of rows no token uses
    whole = logits.double()
    whole[:, list(rows)] = -torch.inf
    wanted = (exact.logsumexp(1) - whole.logsumexp(1)).numpy()
    inside = torch.arange(count) % 3 > 0
    eligible = torch.arange(count) % 3 > 1
    returned = sent(logits, eligible, inside, heat, rows)
    channel = decode(returned[:, rows[0]], returned[:, rows[1]])
    fired = eligible.numpy() & (wanted < np.log(0.05))
    assert (channel.masked == fired).all()
    assert fired.sum() > 5
    assert wanted[fired].min() < np.log(1e-20)
    assert (channel.inside == inside.numpy()).all()
    assert (channel.top_ids == tops.numpy()).all()
    assert np.abs(channel.log_rest - wanted)[fired].max() < NATS
    np.testing.assert_allclose(channel.top_probs, -np.expm1(wanted), atol=NATS)
    assert (channel.confident(0.95) == (inside.numpy() & (wanted < np.log(0.05)))).all()
    behaviour = torch.where(torch.from_numpy(fired)[:, None], exact, whole)
    kept = np.isfinite(behaviour.numpy())
    np.testing.assert_allclose(returned[kept], (behaviour / heat).log_softmax(-1).numpy()[kept], atol=NATS)
    assert (np.exp(returned[:, list(rows)].astype(np.float64)) < np.exp(-59)).all()


def test_rows_that_do_not_report_keep_their_spare_rows_at_zero_probability() -> None:
    logits = torch.randn(2, 10)
    mask = top_token_mask(logits, torch.zeros(2, dtype=torch.bool), 0.95, banned=(8, 9))
    encode(logits, mask, torch.zeros(2, dtype=torch.bool), torch.tensor([True, False]), None, torch.tensor([8, 9]))
    assert torch.isfinite(logits[0]).all()
    assert (logits[1, 8:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("flag", "top"), [(-22.0, -19.5), (-np.inf, -np.inf), (np.nan, -300.0), (-60.5, -12.0), (-61.0, -300.5)], ids=lambda value: f"{value:g}"
)
def test_log_probs_of_a_server_without_the_processor_are_refused(flag: float, top: float) -> None:
    with pytest.raises(ValueError, match=r"position 1: .*--logits-processors headrace"):
        decode(np.array([-61.0, flag]), np.array([-300.0, top]))


def test_spare_rows_are_banned_and_no_token(tiny: Tiny) -> None:
    rows = spare_rows(tiny.encoder)
    assert set(rows) <= set(tiny.encoder.banned_ids)
    assert not set(rows) & set(tiny.encoder.tokenizer.get_vocab().values())


def test_a_model_without_spare_rows_is_refused(tiny: Tiny) -> None:
    """Contract 4. Reserved tokens are banned too, but they are tokens."""
    reserved = tuple(index for index in tiny.encoder.banned_ids if index < len(tiny.encoder.tokenizer))
    assert reserved
    with pytest.raises(ValueError, match=r"needs 2 rows .* found 0"):
        spare_rows(replace(tiny.encoder, banned_ids=reserved))


def configuration(path: Path | None, size: int = 64, mode: str = "processed_logprobs", speculative: object = None) -> SimpleNamespace:
    model = SimpleNamespace(logprobs_mode=mode, get_vocab_size=lambda: size)
    additional = {} if path is None else {"headrace": str(path)}
    return SimpleNamespace(model_config=model, speculative_config=speculative, additional_config=additional)


def test_a_server_that_cannot_carry_the_mask_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    write_settings(tiny.encoder, path)
    assert list(tmp_path.iterdir()) == [path]
    settings = load_settings(configuration(path))  # type: ignore[arg-type]
    assert settings.spare_rows == spare_rows(tiny.encoder)
    assert tuple(settings.banned) == tiny.encoder.banned_ids
    refusals = [
        (configuration(path, speculative=object()), "speculative decoding"),
        (configuration(path, mode="raw_logprobs"), "processed_logprobs"),
        (configuration(path, size=96), "vocabulary of 64, the server's model has 96"),
        (configuration(None), "--additional-config"),
    ]
    for wrong, text in refusals:
        with pytest.raises(ValueError, match=text):
            load_settings(wrong)  # type: ignore[arg-type]


def test_settings_that_cannot_be_read_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(ValueError, match=r"settings\.json: .*cannot be read"):
        read_settings(path)
    path.write_text('{"vocab_size": 80}')
    with pytest.raises(ValueError, match=r"settings\.json: not the top-token processor's settings \(think_open"):
        read_settings(path)


def test_what_a_request_tells_the_processor(tiny: Tiny) -> None:
    request = SampleRequest(tiny.prompt("a"), 0, 1, SamplingParameters(max_tokens=4), confidence=0.9)
    assert request_arguments(request) == {"threshold": 0.9, "mask": False, "inside": True}
    rule = TopTokenRule(threshold=0.97, token_filter="lexical", cap=7)
    masked = {"threshold": 0.97, "mask": True, "filter": "lexical", "cap": 7, "inside": True}
    assert request_arguments(replace(request, mask=rule)) == masked
    truncated = replace(request, parameters=SamplingParameters(max_tokens=4, top_p=0.9, top_k=7))
    assert request_arguments(replace(truncated, mask=rule)) == masked | {"top_p": 0.9, "top_k": 7}
