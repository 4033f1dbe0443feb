"""Many videos at once through all stages, and what they came to, read back from disk."""

from collections.abc import Sequence
from pathlib import Path

from headrace.questions.hopchain.accounts import Account
from headrace.questions.hopchain.dataset import Kept
from headrace.questions.hopchain.records import Candidate, Caption, Cost
from headrace.questions.hopchain.settings import CorpusConfig
from headrace.questions.hopchain.stages import process
from headrace.questions.hopchain.state import Stage, VideoStore
from headrace.questions.hopchain.videos import VideoList
from headrace.questions.hopchain.workshop import Admitted, Captioned, Judged, Segmented, Solved, Workshop, Written, gather, proxy_of


async def work(shop: Workshop, videos: VideoList, state: Path) -> None:
    """Take every video through its stages, ``config.at_once`` of them at a time.

    Raises:
        ServerDown: a server is gone; what is done stays done.
    """
    waiting = iter(videos.videos)

    async def worker() -> None:
        for video in waiting:
            await process(shop, VideoStore(state, video))

    await gather(*(worker() for _ in range(min(shop.config.at_once, len(videos.videos)))))


class Tally:
    """The account of every stage, and the questions that are left."""

    def __init__(self, videos: VideoList) -> None:
        units = {"videos": "videos", "admit": "videos", "segment": "videos", "caption": "videos"}
        questions = {"write": "questions", "judge": "questions", "difficulty": "questions", "assemble": "questions"}
        self.accounts = {stage: Account(stage, unit) for stage, unit in {**units, **questions}.items()}
        self.kept: list[Kept] = []
        self.captions: dict[str, tuple[Caption, ...]] = {}
        self.judgements = self.rewrites = self.passed_at_once = 0
        self.accounts["videos"].kept = len(videos.videos)
        for _, drop in videos.dropped:
            self.accounts["videos"].count(drop.reason, drop.detail)

    def add(self, shop: Workshop, store: VideoStore) -> None:
        """Count one finished video."""
        admitted, segmented, captioned = (
            store.load("admit", Admitted),
            store.load("segment", Segmented),
            store.load("caption", Captioned),
        )
        for stage, record in (("admit", admitted), ("segment", segmented), ("caption", captioned)):
            if record is not None:
                self._stage(stage, record)
        written, judged, solved = store.load("write", Written), store.load("judge", Judged), store.load("difficulty", Solved)
        if captioned is None or written is None or judged is None or solved is None:
            return
        for stage, cost in (("write", written.cost), ("judge", judged.cost), ("difficulty", solved.cost)):
            self.accounts[stage].cost += cost
        left: list[Candidate] = []
        for before, trial in zip(written.trials, judged.trials, strict=True):
            self.accounts["write"].count("" if before.fate == "open" else before.fate, before.detail)
            if before.fate != "open":
                continue
            self.judgements, self.rewrites = self.judgements + trial.judgements, self.rewrites + trial.rewrites
            self.passed_at_once += trial.fate == "kept" and trial.judgements == 1
            self.accounts["judge"].count("" if trial.fate == "kept" else trial.fate, trial.detail)
            if trial.fate == "kept" and trial.candidate is not None:
                left.append(trial.candidate)
        for candidate in left:
            fate = solved.fates[candidate.specification.question_id]
            self.accounts["difficulty"].count("" if fate == "kept" else fate, solved.detail)
            if fate == "kept":
                self.kept.append(Kept(candidate, store.video, proxy_of(shop, store), len(captioned.captions)))
                self.captions[store.video.id] = captioned.captions

    def _stage(self, stage: str, record: Stage) -> None:
        self.accounts[stage].count(record.dropped, record.detail)
        self.accounts[stage].cost += record.cost

    @property
    def cost(self) -> Cost:
        return sum((account.cost for account in self.accounts.values()), Cost())


def tally(shop: Workshop, videos: VideoList, state: Path) -> Tally:
    """Read back what became of every video."""
    counted = Tally(videos)
    for video in videos.videos:
        counted.add(shop, VideoStore(state, video))
    return counted


def worst(accounts: Sequence[Account], most: int = 3) -> str:
    """The commonest reasons, for the message of a corpus that came out empty."""
    reasons = sorted(
        (
            (count, account.stage, reason, account.examples.get(reason, ""))
            for account in accounts
            for reason, count in account.dropped.items()
        ),
        key=lambda entry: -entry[0],
    )
    return "; ".join(
        f"{stage} {reason} {count}" + (f" (e.g. {example})" if example else "") for count, stage, reason, example in reasons[:most]
    )


def configured_stages(config: CorpusConfig) -> dict[str, object]:
    """The fields that a video's state depends on, flat: a corpus goes on under the same ones only."""
    changes = {"at_once", "decoders", "keep_per_video", "held_out", "name", "folder"}
    tuning = {"url", "key_variable", "concurrency", "timeout", "patience"}  # of a server
    flat: dict[str, object] = {}

    def visit(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if not (name.startswith("models.") and key in tuning) and (name, key) != ("difficulty", "engine"):
                    visit(part, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    visit({key: value for key, value in config.model_dump(mode="json").items() if key not in changes}, "")
    return flat
