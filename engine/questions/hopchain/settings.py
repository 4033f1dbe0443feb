"""A corpus as one typed configuration (docs/hopchain.md)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config import EngineConfig, LocalEngineConfig, Model
from headrace.questions.hopchain.specification import PROFILES, Profile


class VideoFolder(Model):
    path: Path
    """A folder, searched with its sub-folders for video files; or a ``.jsonl`` manifest of ``{"path": …, "id": …, "source": …}``."""
    source: str | None = None
    """Name of the collection; None takes the folder's name."""


class FilesConfig(Model):
    kind: Literal["files"] = "files"
    folders: tuple[VideoFolder, ...] = Field(min_length=1)
    """Where the videos lie."""


class WorldConfig(Model):
    """Videos made from scripts, whose truth is known."""

    kind: Literal["scripted"]
    count: int = Field(64, ge=1, le=1_000_000)
    """Videos."""
    shots: int = Field(8, ge=2, le=96)
    """Shots of a video; up to 12 each has a place of its own."""
    shot_seconds: tuple[float, float] = (2.5, 4.0)
    """Shortest and longest shot."""
    fps: int = Field(8, ge=6, le=60)
    """Frames a second."""
    size: int = Field(64, ge=32, le=512)
    """Pixels a side."""
    bad_captions: float = Field(0.0, ge=0, le=1)
    """Share of captions that come back empty."""
    faults: float = Field(0.0, ge=0, le=1)
    """Share of written questions that carry a fault for checks and judge to find."""
    judge_slips: float = Field(0.0, ge=0, le=1)
    """Share of judgements that are not JSON."""
    solver_skill: float = Field(0.8, ge=0, le=1)
    """Probability that the scripted base policy settles a hop rightly."""

    @field_validator("shot_seconds")
    @classmethod
    def _in_order(cls, seconds: tuple[float, float]) -> tuple[float, float]:
        if not 2.0 <= seconds[0] <= seconds[1] <= 10.0:
            raise ValueError("expected 2 <= shortest <= longest <= 10")
        return seconds


VideosConfig = Annotated[FilesConfig | WorldConfig, Field(discriminator="kind")]


class ServerConfig(Model):
    """A model behind an OpenAI-compatible server."""

    url: str
    """Root of its API, e.g. ``http://127.0.0.1:8000/v1``."""
    model: str
    """Name under which the server serves it."""
    key_variable: str | None = None
    """Environment variable that holds the API key, where the server wants one."""
    concurrency: int = Field(32, ge=1)
    """Requests on their way at once."""
    max_tokens: int = Field(1024, ge=1)
    """Tokens of a reply."""
    timeout: float = Field(300.0, gt=0)
    """Seconds a reply may take."""
    patience: float = Field(120.0, ge=0)
    """Seconds for which a server that fails is tried again; then the run stops, to be gone on with."""
    json_mode: bool = False
    """Ask writer and judge for ``response_format: json_object``."""

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("expected a URL such as http://127.0.0.1:8000/v1")
        return url.rstrip("/")


class ModelsConfig(Model):
    captioner: ServerConfig
    """Vision-language model that describes a shot."""
    writer: ServerConfig
    """Text model that writes questions."""
    judge: ServerConfig | None = None
    """Text model that judges them; None takes the writer."""


class ShotsConfig(Model):
    threshold: float = Field(27.0, gt=0)
    """Content score from which a frame is a cut."""
    min_scene_frames: int = Field(15, ge=1)
    """Frames between two cuts."""
    min_seconds: float = Field(2.0, gt=0)
    """Shorter shots are merged."""
    max_seconds: float = Field(10.0, gt=0)
    """Longer shots are cut into equal parts."""
    strict_max: bool = False
    """Cut again what merging made longer than max_seconds."""


class CaptionsConfig(Model):
    fps: float = Field(1.0, gt=0)
    """Frames of a shot shown to the captioner, a second."""
    max_pixels: int = Field(1_000_000, ge=1024)
    """Pixels of such a frame."""
    min_share: float = Field(0.5, ge=0, le=1)
    """Share of a video's shots that must have a caption."""
    max_shots: int = Field(200, ge=1)
    """Shots that writer and judge read, evenly thinned."""


class DrawConfig(Model):
    profile: Literal["release", "paper_marginal"] | None = None
    """Published hop weights; None takes ``hops``, or ``release`` where that is left out too."""
    hops: dict[int, float] | None = None
    """Own weights of the hop counts."""
    max_number: int = Field(80, ge=2)
    """Numbers are drawn from 1..max_number."""
    per_video: int = Field(2, ge=1)
    """Questions written per video."""
    feedback: bool = False
    """Show a rewrite what the judge found; the paper gives it the captions and the specification only."""
    rewrite_temperature: float = Field(0.7, gt=0)
    """Temperature of rewrites; at 0 the second would repeat the first."""

    @model_validator(mode="after")
    def _one_source(self) -> "DrawConfig":
        if self.profile and self.hops:
            raise ValueError("give profile or hops, not both")
        self.drawn()
        return self

    def drawn(self) -> Profile:
        """The profile to draw from."""
        return Profile(self.hops or PROFILES[self.profile or "release"].hops, self.max_number)


class DifficultyConfig(Model):
    """Questions that the base policy solves too often are dropped."""

    model: Path | None = None
    """Model directory of the base policy; None takes the scripted one, in a scripted world."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Its compute type."""
    engine: EngineConfig = LocalEngineConfig()
    """Where it draws: in this process, or on vLLM servers."""
    rollouts: int = Field(8, ge=1)
    """Answers per question."""
    drop_from: float = Field(0.75, gt=0, le=1)
    """Share of right ones from which a question is dropped."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the answers."""
    max_tokens: int = Field(2048, ge=1)
    """Tokens of an answer."""
    max_prompt_tokens: int = Field(5376, ge=1)
    """Longer prompts are dropped."""


class HeldOutConfig(Model):
    """One question per video, stratified on three axes."""

    size: int = Field(1000, ge=0)
    """Questions; fewer where the corpus has too few videos."""
    max_share: float = Field(0.2, gt=0, lt=1)
    """Most of the videos that may be held out."""
    min_hops: int = Field(4, ge=1)
    """Hops of a held-out question at least."""
    min_types: int = Field(2, ge=1)
    """Distinct hop types at least."""
    hops: dict[int, float] | None = Field({4: 302.0, 5: 450.0, 6: 248.0})
    """Weights of the hop counts; None takes the corpus' own."""
    shots: dict[int, float] | None = Field({40: 151.0, 70: 301.0, 110: 300.0, 0: 248.0})
    """Weights of the lengths: upper bound (exclusive) in shots, 0 for no bound; None leaves length out."""
    sources: dict[str, float] | None = None
    """Weights of the sources; None takes the corpus' own."""
    split_seed: int = 42
    """Orders the videos; the first may be held out."""
    draw_seed: int = 1234
    """Of the stratified draw."""


class CorpusConfig(Model):
    """A Video-HopChain corpus."""

    name: str = "hopchain"
    """``data_source`` of the rows."""
    folder: Path
    """Folder of the corpus: the data set, and under ``work/`` the state of every video."""
    seed: int = 0
    """Of the scripted world and of the difficulty filter's draws; specifications depend on the video id alone."""
    videos: VideosConfig
    models: ModelsConfig | None = None
    """Servers; may be left out in a scripted world, whose models are code."""
    min_duration: float = Field(180.0, ge=0)
    """Shorter videos are dropped; seconds."""
    frames: int = Field(140, ge=2)
    """Frames of the proxy that the policy sees."""
    max_pixels: int = Field(50_176, ge=1024)
    """Pixels of such a frame."""
    shots: ShotsConfig = ShotsConfig()
    captions: CaptionsConfig = CaptionsConfig()
    draw: DrawConfig = DrawConfig()
    difficulty: DifficultyConfig | None = DifficultyConfig()
    """None keeps every question."""
    keep_per_video: int = Field(2, ge=1)
    """Questions of a video that stay; the least alike do."""
    held_out: HeldOutConfig = HeldOutConfig()
    system_prompt: str | None = None
    """System message of the rows; None takes the packaged one, which states the contract ``answer_boxed``."""
    at_once: int = Field(16, ge=1)
    """Videos in work at the same time."""
    decoders: int = Field(4, ge=1)
    """Threads that decode and encode."""

    @model_validator(mode="after")
    def _models_exist(self) -> "CorpusConfig":
        scripted = self.videos.kind == "scripted"
        if self.models is None and not scripted:
            raise ValueError("models: real videos need a captioner and a writer; only a scripted world can do without")
        if self.difficulty is not None and self.difficulty.model is None and not scripted:
            raise ValueError(
                "difficulty.model: the filter needs the base policy's model directory; `difficulty: null` keeps every question"
            )
        return self
