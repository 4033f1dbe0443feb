"""How responses are drawn, on what engine, and how far ahead."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config.base import Model


class CGEConfig(Model):
    """Confidence-Gated Exploration (docs/cge.md)."""

    first_wave_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the group drawn freely first."""
    threshold: float = Field(0.95, gt=0.5, lt=1)
    """The top token is removed where its probability is strictly above."""
    max_mean: float = Field(1.0, ge=0, le=1)
    """Trigger only when the first wave's mean accuracy is at most this: 0.5 leaves all-correct groups alone."""
    token_filter: Literal["none", "lexical"] = "lexical"
    """``lexical`` spares positions whose top token is special, punctuation, a digit or has no letter."""
    cap: int = Field(16_384, ge=1)
    """Masked positions allowed per response."""
    control_share: float = Field(0.0, ge=0, le=1)
    """Share of triggered groups that draw their second wave unmasked: the randomised control."""


class SamplingConfig(Model):
    group_size: int = Field(8, ge=2)
    """Rollouts per question."""
    max_tokens: int = Field(ge=1)
    """Response tokens, end token included."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the behaviour policy; the learner uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 the ratio would be against a truncated distribution, so only evaluation may use it."""
    top_k: int = Field(-1, ge=-1)
    """Top-k; -1 is off. Evaluation only, like top_p."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's end tokens."""
    think_prefill: bool = True
    """End the prompt with an opening think tag."""
    batch_rows: int = Field(256, ge=1)
    """Rows the local engine draws at once."""
    cge: CGEConfig | None = None
    """Two-wave exploration; None draws the whole group freely."""

    @model_validator(mode="after")
    def _untruncated(self) -> "SamplingConfig":
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError(
                f"sampling.top_p = {self.top_p} and top_k = {self.top_k} truncate the behaviour policy, which the loss cannot "
                "account for; train with top_p = 1 and top_k = -1 (evaluation has its own)"
            )
        return self


class LocalEngineConfig(Model):
    kind: Literal["local"] = "local"
    """Draw in the learner's own process, with its own weights."""


class VLLMEngineConfig(Model):
    kind: Literal["vllm"]
    """Draw on vLLM servers (docs/vllm.md)."""
    urls: tuple[str, ...] = ()
    """Servers that run already, ``http://host:port``; empty starts the run's own."""
    servers: int = Field(1, ge=1)
    """Servers to start."""
    rollout_ranks: int = Field(0, ge=0)
    """Last ranks of ``torchrun`` that look after servers instead of learning; 0 starts the servers on rank 0's host."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one server."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the server's weights; None takes ``model.dtype``."""
    memory: float = Field(0.8, gt=0, le=1)
    """Share of each GPU's memory that a server takes; on a CPU, GiB of its key-value cache."""
    max_num_seqs: int = Field(256, ge=1)
    """Responses one server draws at once."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the servers, as on vLLM's command line."""
    start_deadline: float = Field(900.0, gt=0)
    """Seconds a server may take until it answers."""
    request_deadline: float = Field(3600.0, gt=0)
    """Seconds one response may take; later it is aborted and its question queued again."""
    max_restarts: int = Field(3, ge=0)
    """Restarts within ten minutes after which a dead server ends the run."""
    transport: Literal["nccl", "shm"] | None = None
    """How weights travel: None takes NCCL on GPUs and shared memory on a CPU."""
    bucket_mib: int = Field(512, ge=1)
    """Weights sent at a time."""

    @model_validator(mode="after")
    def _one_owner(self) -> "VLLMEngineConfig":
        if self.urls and self.rollout_ranks:
            raise ValueError("engine.urls names servers that run already; rollout_ranks start their own: give one of the two")
        return self

    @model_validator(mode="after")
    def _addresses(self) -> "VLLMEngineConfig":
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.urls: {url!r} is no address of a server; expected http://host:port")
        names = [url.rstrip("/") for url in self.urls]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"engine.urls names {twice} twice; one push cannot go to the same server two times at once")
        return self


EngineConfig = Annotated[LocalEngineConfig | VLLMEngineConfig, Field(discriminator="kind")]


class ScheduleConfig(Model):
    """How far sampling may run ahead of learning (docs/asynchrony.md)."""

    staleness: float = Field(0.0, ge=0)
    """Parameter versions by which sampling may run ahead; 0 is synchronous, 0.5 lets half a version's questions start early."""
    sync_interval: int = Field(1, ge=1)
    """Batches trained between two pushes of the weights to the engine; each push is a parameter version."""
