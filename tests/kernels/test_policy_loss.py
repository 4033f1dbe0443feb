"""The loss over given log-probs: worked numbers, derivatives, poisoned rows, metrics."""

import math

import pytest
import torch

from headrace.kernels import Metric, PolicySpec, combine_metrics, empty_metrics, policy_loss, summarise_metrics
from headrace.kernels.policy_spec import TokenStreams
from headrace.kernels.reference.loss_rows import token_loss

OPTIONAL = ("gates", "ref_logprobs", "proximal_logprobs", "mask")


def loss_of_ratios(ratios, advantages, spec=None, implementation=None, weights=None, **streams):
    """Objective per token is −loss; log π is chosen so that old = −1."""
    log_ratios = torch.tensor(ratios).double().log()
    logprobs = (log_ratios - 1).float().requires_grad_()
    advantages = torch.tensor(advantages, dtype=torch.float32)
    weights = torch.ones(len(ratios)) if weights is None else torch.tensor(weights)
    out = policy_loss(
        logprobs,
        torch.zeros(len(ratios)),
        torch.full((len(ratios),), -1.0),
        advantages,
        weights,
        spec or PolicySpec(),
        implementation=implementation,
        **streams,
    )
    out.loss.backward()
    return out, logprobs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "alive"),
    [
        (1, 1, 1, True),
        (1.5, 1, 1.3, False),
        (0.5, 1, 0.5, True),
        (0.5, -1, -0.8, False),
        (1.5, -1, -1.5, True),
        (12, -1, -12, True),
        (0.05, 1, 0.05, True),
        (0.05, -1, -0.8, False),
    ],
)
def test_ex_3_6_token_objective(ratio, advantage, objective, alive, implementation):
    out, grad = loss_of_ratios([ratio], [advantage], implementation=implementation)
    assert -out.loss.item() == pytest.approx(objective, rel=1e-5)
    assert bool(grad[0] != 0) == alive
    if alive:
        assert grad[0].item() == pytest.approx(-ratio * advantage, rel=1e-5)


def test_ex_3_6_dual_clip(implementation):
    out, grad = loss_of_ratios([12.0], [-1.0], PolicySpec(dual_clip=10.0), implementation)
    assert -out.loss.item() == pytest.approx(-10, rel=1e-6)
    assert grad[0] == 0
    assert out.metrics[Metric.CLIPPED_DUAL] == 1


@pytest.mark.parametrize(
    ("weights", "objective"),
    [
        ([1 / 8] * 8, -0.5),
        ([1 / 4] * 2 + [1 / 12] * 6, 0.0),
        ([1 / 2] * 8, -2.0),
    ],
    ids=["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"],
)
def test_ex_3_7_aggregations_are_weights(weights, objective, implementation):
    out, _ = loss_of_ratios([1.0] * 8, [1.0] * 2 + [-1.0] * 6, weights=weights, implementation=implementation)
    assert -out.loss.item() == pytest.approx(objective, abs=1e-6)


def test_ex_4_6_masked_positions_leave_the_sum_not_the_denominator(implementation):
    ratios, advantages = [1, 1.4, 0.9, 0.05, 1], [1.0, 1, 1, -1, -1]
    spec, weights = PolicySpec(), [0.2] * 5
    everywhere, _ = loss_of_ratios(ratios, advantages, spec, implementation, weights)
    mask = torch.tensor([True, True, True, False, True])
    masked, grad = loss_of_ratios(ratios, advantages, spec, implementation, weights, mask=mask)
    assert -everywhere.loss.item() == pytest.approx(0.28, abs=1e-6)
    assert -masked.loss.item() == pytest.approx(0.44, abs=1e-6)
    assert grad[3] == 0
    assert masked.metrics[Metric.TOKENS] == 4


def test_ex_6_6_gate_scales_the_gradient_of_positive_advantages_only(implementation):
    gates = torch.tensor([1, 0.464559, 0.464559, 1])
    for advantage in (1.7320508, -0.5773503):
        _, plain = loss_of_ratios([1.0] * 4, [advantage] * 4, implementation=implementation)
        _, gated = loss_of_ratios([1.0] * 4, [advantage] * 4, implementation=implementation, gates=gates)
        torch.testing.assert_close(gated, plain * gates if advantage > 0 else plain)
        if advantage > 0:
            assert -gated[1].item() == pytest.approx(0.804640, abs=1e-5)


def test_ex_6_8_gates_on_vppo_credits(implementation):
    credit, gates = 1.1 * 0.5 * torch.tensor([0.0, 1, 0, 1, 0]), torch.tensor([1, 0.6, 1, 0.3, 1])
    _, positive = loss_of_ratios([1.0] * 5, credit.tolist(), implementation=implementation, gates=gates)
    _, negative = loss_of_ratios([1.0] * 5, (-credit).tolist(), implementation=implementation, gates=gates)
    torch.testing.assert_close(-positive, torch.tensor([0, 0.33, 0, 0.165, 0]))
    torch.testing.assert_close(-negative, torch.tensor([0, -0.55, 0, -0.55, 0]))


def test_section_6_7_surprisal_is_a_penalty(implementation):
    logprobs = torch.tensor([-0.5, -1.5, -1.0], requires_grad=True)
    zero, third = torch.zeros(3), torch.full((3,), 1 / 3)
    out = policy_loss(logprobs, zero, logprobs.detach(), zero, third, PolicySpec(surprisal_coef=0.1), implementation=implementation)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.1, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.full((3,), -0.1 / 3))


def test_section_6_7_reference_kl(implementation):
    logprobs, reference = torch.tensor([-0.5, -1.5, -1.0]), torch.tensor([-0.6, -1.2, -1.0])
    zero = torch.zeros(3)
    for token, expected in enumerate([0.004837, 0.049859, 0.0]):
        weights = torch.zeros(3)
        weights[token] = 1
        spec = PolicySpec(kl_coef=1.0)
        out = policy_loss(logprobs, zero, logprobs, zero, weights, spec, ref_logprobs=reference, implementation=implementation)
        assert out.loss.item() == pytest.approx(expected, abs=1e-6)
    assert out.metrics[Metric.REFERENCE_KL].item() / 3 == pytest.approx(0.018232, abs=1e-6)


def test_section_7_3_gspo(implementation):
    log_ratios = torch.tensor([0.2, -0.1, 0.05])
    old = torch.tensor([-1.0, -2.0, -3.0])
    cu = torch.tensor([0, 3])
    zero, third = torch.zeros(3), torch.full((3,), 1 / 3)
    call = {"cu_seqlens": cu, "implementation": implementation}
    one = torch.ones(3)
    wide = policy_loss(old + log_ratios, zero, old, -one, third, PolicySpec("gspo", 1.0, 1.0), **call)
    assert wide.loss.item() == pytest.approx(1.051271, abs=1e-5)
    narrow = policy_loss(old + log_ratios, zero, old, one, third, PolicySpec("gspo", 3e-4, 4e-4), **call)
    assert -narrow.loss.item() == pytest.approx(1.0004, abs=1e-6)
    with pytest.raises(ValueError, match="cu_seqlens"):
        policy_loss(old, zero, old, one, third, PolicySpec("gspo"), implementation=implementation)


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    """With one advantage per sequence and equal weights the token form is the exact derivative."""
    old, cu = torch.randn(9).double(), torch.tensor([0, 4, 4, 9])
    logprobs = (old + 0.05 * torch.randn(9)).requires_grad_()
    advantages = torch.tensor([1.0] * 4 + [-0.7] * 5).double()
    weights = torch.tensor([1 / 4] * 4 + [1 / 5] * 5).double()
    out = policy_loss(logprobs, torch.zeros(9).double(), old, advantages, weights, PolicySpec("gspo", 0.5, 0.5), cu_seqlens=cu)
    plain = logprobs.detach().clone().requires_grad_()
    ratios = torch.stack([(plain - old)[:4].mean().exp(), (plain - old)[4:].mean().exp()])
    (-(ratios * torch.tensor([1.0, -0.7])).sum()).backward()
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, plain.grad)


def test_section_7_3_cispo_weights(implementation):
    _, grad = loss_of_ratios([math.exp(0.5), math.exp(-0.5), math.exp(0.1)], [1.0] * 3, PolicySpec("cispo"), implementation)
    torch.testing.assert_close(-grad, torch.tensor([1.3, 0.8, 1.105171]))


def test_section_7_3_truncated_importance_weights(implementation):
    old = torch.full((3,), -2.0)
    proximal = old + torch.tensor([1, 0.2, -1.0])
    logprobs = proximal.clone().requires_grad_()
    out = policy_loss(
        logprobs,
        torch.zeros(3),
        old,
        torch.ones(3),
        torch.ones(3),
        PolicySpec(tis_cap=2.0),
        proximal_logprobs=proximal,
        implementation=implementation,
    )
    out.loss.backward()
    torch.testing.assert_close(-logprobs.grad, torch.tensor([2, 1.221403, 0.367879]))
    assert out.metrics[Metric.TIS_CAPPED] == 1


@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["ppo", "cispo"])
@pytest.mark.parametrize("options", [(), OPTIONAL[:3], ("proximal_logprobs",)], ids=str)
def test_value_and_gradient_against_autograd(kind, kl_kind, options, make_batch, oracle, implementation):
    dtype = torch.float64 if implementation == "reference" else torch.float32
    s = make_batch(tokens=200, dtype=dtype).streams
    spec = PolicySpec(
        kind,
        dual_clip=None if kind == "cispo" else 1.5,
        tis_cap=1.2 if "proximal_logprobs" in options else None,
        kl_coef=0.3 if "ref_logprobs" in options else 0.0,
        kl_kind=kl_kind,
        entropy_coef=0.05,
        surprisal_coef=0.02,
    )
    logprobs = (s["old_logprobs"] + 0.5 * torch.randn(200, dtype=dtype)).requires_grad_()
    entropies = torch.rand(200, dtype=dtype, requires_grad=True)
    chosen = {name: s[name] for name in options}
    out = policy_loss(logprobs, entropies, s["old_logprobs"], s["advantages"], s["weights"], spec, implementation=implementation, **chosen)
    (2 * out.loss).backward()
    got = logprobs.grad.clone(), entropies.grad.clone()
    logprobs.grad = entropies.grad = None
    expected = oracle.token_losses(
        logprobs,
        entropies,
        s["old_logprobs"],
        s["advantages"],
        s["weights"],
        spec,
        chosen.get("gates"),
        chosen.get("ref_logprobs"),
        chosen.get("proximal_logprobs"),
    ).sum()
    (2 * expected).backward()
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(got[0], logprobs.grad)
    torch.testing.assert_close(got[1], entropies.grad)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_rows_that_do_not_count_are_never_read(kind, poison, make_batch, implementation):
    s = make_batch(tokens=64).streams
    mask = s.pop("mask")
    names = [name for name in s if name not in ("old_logprobs", "advantages", "weights")]
    spec = PolicySpec(kind, tis_cap=1.5, kl_coef=0.1, entropy_coef=0.1, surprisal_coef=0.1)
    results = []
    for bad in (0.0, poison):
        streams = {name: torch.where(mask, value, bad) for name, value in s.items()}
        logprobs = torch.where(mask, s["old_logprobs"] + 0.1, bad).requires_grad_()
        entropies = torch.where(mask, 1.0, bad).requires_grad_()
        out = policy_loss(
            logprobs,
            entropies,
            streams["old_logprobs"],
            streams["advantages"],
            streams["weights"],
            spec,
            mask=mask,
            cu_seqlens=torch.tensor([0, 20, 64], dtype=torch.int32),
            implementation=implementation,
            **{name: streams[name] for name in names},
        )
        out.loss.backward()
        results.append((out.loss.detach(), out.metrics, logprobs.grad, entropies.grad))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.isfinite(poisoned).all()
        assert torch.equal(clean, poisoned)
    assert (results[1][2][~mask] == 0).all()


def test_extreme_log_ratios_stay_finite(implementation):
    """Log-ratios are clamped to ±20 nats and k3 to 10; beyond them the loss is constant."""
    old = torch.tensor([-500.0, -1.0, -30.0, -1.0])
    logprobs = torch.tensor([-1.0, -500.0, -1.0, -40.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    spec = PolicySpec(kl_coef=1.0)
    reference = torch.tensor([-1.0, -1.0, -500.0, -1.0])
    one = torch.ones(4)
    out = policy_loss(logprobs, torch.zeros(4), old, advantages, one, spec, ref_logprobs=reference, implementation=implementation)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0] == 0  # its ratio is clamped, its KL zero
    assert out.metrics[Metric.RATIO_MAX].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert out.metrics[Metric.REFERENCE_KL] <= 10 + 20 + 10 + 1e-3


def test_float64_gradcheck(make_batch):
    s = make_batch(tokens=12, dtype=torch.float64).streams
    logprobs = (s["old_logprobs"] + 0.05).requires_grad_()
    entropies = torch.rand(12, dtype=torch.float64, requires_grad=True)
    for kind in ("ppo", "cispo"):
        spec = PolicySpec(kind, 0.9, 9.0, tis_cap=1.1, kl_coef=0.2, entropy_coef=0.1, surprisal_coef=0.1)
        if kind == "cispo":
            spec = PolicySpec(kind, 1e-9, 1e-9, kl_coef=0.2, entropy_coef=0.1)
        chosen = {name: s[name] for name in OPTIONAL}

        def loss(logprobs, entropies, spec=spec, chosen=chosen):
            return policy_loss(logprobs, entropies, s["old_logprobs"], s["advantages"], s["weights"], spec, **chosen).loss

        assert torch.autograd.gradcheck(loss, (logprobs, entropies))


def test_metrics_add_up_over_micro_batches(make_batch, implementation):
    s = make_batch(tokens=90).streams
    spec = PolicySpec(tis_cap=1.1, kl_coef=0.1)
    logprobs, entropies = s["old_logprobs"] + 0.3 * torch.randn(90), torch.rand(90)

    def part(rows):
        chosen = {name: value[rows] for name, value in s.items()}
        positional = [chosen.pop(name) for name in ("old_logprobs", "advantages", "weights")]
        return policy_loss(logprobs[rows], entropies[rows], *positional, spec, implementation=implementation, **chosen)

    whole = part(slice(None))
    parts = [part(slice(0, 30)), part(slice(30, 31)), part(slice(31, 90))]
    combined = combine_metrics([empty_metrics(), *(each.metrics for each in parts)])
    torch.testing.assert_close(combined, whole.metrics)
    torch.testing.assert_close(sum(each.loss for each in parts), whole.loss)

    mask, ratio = s["mask"], (logprobs - s["proximal_logprobs"]).exp()
    assert whole.metrics[Metric.TOKENS] == mask.sum()
    assert whole.metrics[Metric.RATIO].item() == pytest.approx(ratio[mask].sum().item(), rel=1e-5)
    assert whole.metrics[Metric.RATIO_MIN].item() == pytest.approx(ratio[mask].min().item(), rel=1e-5)
    assert whole.metrics[Metric.GATE_ON_POSITIVES].item() == pytest.approx(s["gates"][mask & (s["advantages"] > 0)].sum().item(), rel=1e-5)
    drift = s["old_logprobs"] - logprobs
    assert whole.metrics[Metric.K1].item() == pytest.approx(drift[mask].sum().item(), rel=1e-4)
    assert summarise_metrics(whole.metrics)["tokens"] == mask.sum()


def test_nothing_counts():
    zero = torch.zeros(3)
    out = policy_loss(zero, zero, zero, zero, zero, PolicySpec(), mask=torch.zeros(3, dtype=torch.bool))
    assert out.loss == 0
    assert summarise_metrics(out.metrics) == {"tokens": 0.0}
    assert torch.equal(combine_metrics([out.metrics, empty_metrics()]), empty_metrics())
    none = torch.zeros(0)
    assert policy_loss(none, none, none, none, none, PolicySpec()).loss == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "reinforce"}, "kind"),
        ({"kl_kind": "k4"}, "kl_kind"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"kind": "cispo", "dual_clip": 3.0}, "cispo"),
        ({"tis_cap": 0.0}, "tis_cap"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
    ],
)
def test_bad_specifications_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicySpec(**fields)


@pytest.mark.parametrize(
    ("spec", "streams", "message"),
    [
        (PolicySpec(tis_cap=2.0), {}, "proximal_logprobs"),
        (PolicySpec(kl_coef=0.1), {}, "ref_logprobs"),
        (PolicySpec(), {"gates": torch.ones(2)}, "gates"),
        (PolicySpec("gspo"), {"cu_seqlens": torch.tensor([0, 2])}, "rise from 0 to 3"),
    ],
)
def test_bad_streams_name_the_stream(spec, streams, message):
    zero = torch.zeros(3)
    with pytest.raises(ValueError, match=message):
        policy_loss(zero, zero, zero, zero, zero, spec, **streams)


def test_static_activity_never_misses_a_gradient(make_batch):
    """What `may_have_gradient` rules out has coefficient zero."""
    s = make_batch(tokens=300).streams
    s["advantages"][::3] = 0
    s["gates"][::4] = 0
    s["weights"][::7] = 0
    for spec in (PolicySpec(), PolicySpec(kl_coef=0.1), PolicySpec("cispo")):
        streams = TokenStreams(**s)
        token = token_loss(s["old_logprobs"] + 0.2, torch.rand(300), streams, spec)
        gone = ~streams.may_have_gradient(spec)
        assert gone.any()
        assert (token.grad_logprobs[gone] == 0).all()
        assert (token.grad_entropies[gone] == 0).all()
