"""What flows through the engine: immutable records, one per stage.

question -> prompt -> completion -> rollout -> group -> step batch. A stage takes records and returns new ones
(``dataclasses.replace``); it never reaches back. Arrays are numpy; log-probabilities and entropies are in nats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray
Arm = Literal["free", "masked", "control"]
FinishReason = Literal["stop", "length", "abort"]
TRIAL = "trial"
"""Weight version of tokens that a server drew while it proved that it takes weights (docs/weight_sync.md); they are drawn again."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """A fixed degradation of a picture or clip that keeps its size (``pixels.degrade``)."""

    kind: Literal["patches", "blur", "noise", "grey"]
    seed: int  # 64 bits


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or clip by reference; its pixels are loaded where they are used."""

    kind: Literal["image", "video"]
    path: str
    frames: int | None = None
    """Frames to take, evenly spaced (video only); None takes the processor's default."""
    max_pixels: int | None = None
    """Upper bound on width x height of one picture or frame."""
    intervention: Intervention | None = None
    """Degradation applied on loading; None loads it as it is."""


@dataclass(frozen=True, slots=True)
class Question:
    """One verifiable question."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages ``{"role": …, "content": …}``; a content string names its media by ``<image>`` and ``<video>`` in order."""
    answer: str
    media: tuple[Media, ...] = ()
    source: str = ""
    """Data set or generator the question came from; rewards and breakdowns go by it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the row carried besides: hop count, hop types, tolerance, a generator's own entry."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as the policy sees it."""

    question: Question
    token_ids: Array  # [P] int64, media placeholders expanded to one token per visual feature
    prefilled: bool = False
    """True when the token ids end in an opening think tag that the policy did not generate."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopTokenRule:
    """The top-token mask of Confidence-Gated Exploration (paper 000, Eq. 3)."""

    threshold: float = 0.95
    token_filter: Literal["none", "lexical"] = "none"
    cap: int = 16_384
    """Masked positions allowed per response."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One rollout to draw."""

    prompt: Prompt
    index: int
    """Position of the rollout in its group."""
    seed: int  # 63 bits, keys every draw together with the response position
    parameters: SamplingParameters
    mask: TopTokenRule | None = None
    """Draw under the top-token mask; None draws freely."""
    confidence: float = 0.95
    """Top probability above which a position counts as confident, whether or not it is masked."""


@dataclass(frozen=True, slots=True)
class MaskTrace:
    """What the mask removed; M masked positions, in order (paper 000, Table 9 and Figure 8)."""

    positions: Array  # [M] int32, response positions
    removed_ids: Array  # [M] int32
    removed_probs: Array  # [M] fp32, p* before the mask
    runner_up_probs: Array  # [M] fp32, second probability before the mask
    drawn_ids: Array  # [M] int32
    drawn_ranks: Array  # [M] int32, rank of the drawn token before the mask: 2 is the runner-up; 9 means outside the top 8
    entropies: Array  # [M] fp32, entropy of the unmasked distribution


@dataclass(frozen=True, slots=True)
class Completion:
    """A drawn response of L tokens, EOS included."""

    token_ids: Array  # [L] int32
    logprobs: Array  # [L] fp32, under the distribution that was drawn from
    masked: Array  # [L] bool, positions where the top token was removed
    versions: Array  # [L] int32, parameter version that drew each token
    finish_reason: FinishReason
    examined: int = 0
    """Positions inside the reasoning span."""
    confident: int = 0
    """Of those, positions whose top probability exceeded the threshold."""
    cap_hit: bool = False
    trace: MaskTrace | None = None
    """Set when the mask fired at least once and the engine can trace it."""

    @property
    def path_entropy(self) -> float | None:
        """Mean surprisal of the tokens that were the policy's own choice, in nats (paper 001, Eq. 1).

        Positions under the mask do not count, nor do log-probs that are not finite; None where nothing is left.
        """
        own = self.logprobs[~self.masked & np.isfinite(self.logprobs)]
        return -float(own.mean(dtype=np.float64)) if len(own) else None


@dataclass(frozen=True, slots=True)
class Reward:
    """Score of one response (paper 000, Eq. 1)."""

    total: float
    accuracy: float
    format: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A response in its group."""

    index: int
    wave: Literal[1, 2]
    arm: Arm
    """``free``: no trigger; ``masked`` or ``control``: second wave of a triggered group with or without the mask."""
    completion: Completion
    text: str = ""
    reward: Reward | None = None
    """None while unscored, or when scoring failed: such a rollout does not train."""
    failure: str = ""
    """Why scoring failed: ``timeout``, ``error`` or ``non_finite``."""
    claims: tuple[tuple[int, int], ...] | None = None
    """Token spans [first, past the last) of the response that say what is to be seen; None where no router has answered."""
    prompt: Prompt | None = None
    """The rollout's own prompt, where it was taken into the group of another question; None is the group's."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a teacher wrote about a question, ahead of training; empty where there is nothing."""

    caption: str = ""
    """The picture in words, for a probe without it."""
    visual: str = ""
    """Decomposition of the picture: coordinates, shapes, counts."""
    reasoning: str = ""
    """One key step of the reasoning."""


@dataclass(frozen=True, slots=True)
class Mining:
    """What query mining found out about a question and did (paper 001, phase 0)."""

    zone: Literal["distillation", "trivial", "impossible"]
    kept: bool = True
    """False for a trivial question that is down-sampled: its group does not train."""
    pilot: tuple[float, ...] = ()
    """Accuracies of the scored pilot rollouts."""
    path_entropy: float | None = None
    """Mean over the pilot rollouts, nats per token."""
    deficit: Literal["", "perceptual", "cognitive"] = ""
    """Diagnosis of an impossible question for which there is a hint."""
    probe: tuple[float, ...] = ()
    """Accuracies of the text-only probe; empty where there is no picture, or no words for it."""
    outcome: Literal["", "hinted", "no_hint", "unusable_hint"] = ""
    """What became of an impossible question: drawn again under its hint, or left with its pilot rollouts."""
    hinted: tuple[float, ...] = ()
    """Accuracies under the hint."""
    control: tuple[float, ...] = ()
    """Accuracies of a second draw without a hint; these rollouts never train."""
    extra_rollouts: int = 0
    """Rollouts beyond one group."""


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one question in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    epoch: int = 0
    intervened: bool = False
    """First-wave accuracies had no variance, so the second wave was a candidate for the mask."""
    arm: Arm = "free"
    advantages: Array | None = None  # [G] fp32
    mining: Mining | None = None
    """Set by query mining."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step: N tokens of B responses with their prompts, flat and without padding.

    Every per-token stream is aligned with ``token_ids``: the value at position t belongs to token t, which the hidden
    state at t - 1 predicts. Prompt positions hold zeros and ``response_mask`` False.
    """

    token_ids: Array  # [N] int64
    cu_seqlens: Array  # [B + 1] int32, row boundaries in the flat arrays
    response_mask: Array  # [N] bool, token was drawn by the policy
    loss_mask: Array  # [N] bool, token is in the numerator: response and not CGE-masked
    loss_weight: Array  # [N] fp32, the one normalisation weight; sums over all ranks of the step
    old_logprobs: Array  # [N] fp32, behaviour policy
    advantages: Array  # [N] fp32
    gates: Array  # [N] fp32, multiply positive advantages in the loss
    temperature: float
    media: tuple[tuple[Media, ...], ...]  # per row, by reference
    prompts: Array  # [B] int32, which prompt a row belongs to: rows of one group share pixels
    questions: tuple[str, ...] = ()
    """Question id per row."""
    claims: tuple[tuple[tuple[int, int], ...] | None, ...] = ()
    """``Rollout.claims`` per row; empty when no row has any."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics that credit rules took on the way."""
    watched: Mapping[str, Array] = field(default_factory=dict)
    """Tokens [N] bool by the metric that is to say how much positive credit reached them unclipped, per response token."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """What could not train, by reason: ``unscored`` rollouts and ``empty`` responses have no row at all, tokens with a
    ``non_finite`` behaviour log-prob are outside ``loss_mask``."""
    proximal_logprobs: Array | None = None  # [N] fp32
    """Under the learner's weights before the batch's first step, where ratios are against those; set by the learner itself."""


class EngineDown(RuntimeError):  # noqa: N818
    """An engine died, hangs, or cannot do what is asked of it; the message names it. What it lost may be drawn again once it is back."""


class Engine(Protocol):
    """Draws rollouts. Implemented by ``sampling.local`` and the vLLM client."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            EngineDown: the engine died and its requests are lost.
        """
        ...


class Scorer(Protocol):
    """Scores rollouts of one question. Implemented by ``rewards.pool`` or the user's own reward."""

    async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with ``reward`` or ``failure`` set."""
        ...


@dataclass(frozen=True, slots=True)
class CounterfactualScores:
    """How the responses of a batch fare with degraded media, teacher-forced under the policy before the update.

    Streams are aligned with the batch's ``token_ids``, and 0 on prompts and in rows that were not scored.
    """

    rows: Array  # [B] bool, was scored: the row has media, and the degradation changed them
    own: Array  # [N] bool, tokens that were the policy's own choice: ``loss_mask`` before any credit rule
    logprobs: Array  # [N] fp32 nats
    logprobs_cf: Array  # [N] fp32 nats, with degraded media
    kl: Array  # [N] fp32 nats, KL(original || degraded) over the vocabulary


class CreditRule(Protocol):
    """Says what tokens are worth, from how they fare with degraded media. Pure; implemented in ``credit``."""

    def wanted(self, batch: StepBatch) -> Sequence[tuple[Media, ...]]:
        """Per row the degraded media to score it with as well; empty for rows whose scores cannot change the update."""
        ...

    def refine(self, batch: StepBatch, scores: CounterfactualScores) -> StepBatch:
        """The batch with gates, or with other advantages and numerator, and with what was ``measured``."""
        ...
