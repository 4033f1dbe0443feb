"""The stages of one video, from file to judged and filtered questions; each is done once and kept on disk."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.questions.hopchain.question_stages import judge, solve, write
from headrace.questions.hopchain.records import Dropped
from headrace.questions.hopchain.state import Stage, VideoStore
from headrace.questions.hopchain.video_stages import admit, caption, readable, segment
from headrace.questions.hopchain.workshop import Admitted, Captioned, Segmented, Solved, Workshop, Written

S = TypeVar("S", bound=Stage)


async def process(shop: Workshop, store: VideoStore) -> None:
    """Take one video through every stage that is not done yet.

    Raises:
        ServerDown: a server is gone; everything done so far is kept.
    """
    admitted = await _once(shop, store, "admit", Admitted, lambda: admit(shop, store))
    if admitted.footage is None:
        return
    segmented = await _once(shop, store, "segment", Segmented, lambda: segment(shop, store, admitted.footage))
    if segmented.dropped:
        return
    captioned = await _once(shop, store, "caption", Captioned, lambda: caption(shop, store, segmented.shots))
    if captioned.dropped:
        return
    captions = readable(captioned.captions, shop.config.captions.max_shots)
    written = await _once(shop, store, "write", Written, lambda: write(shop, store.video, captions))
    if written.dropped:
        return
    judged = await judge(shop, store, captions, written.trials)
    await _once(shop, store, "difficulty", Solved, lambda: solve(shop, store, judged.trials))


async def _once(shop: Workshop, store: VideoStore, stage: str, kind: type[S], work: Callable[[], Awaitable[S]]) -> S:
    """The record of a stage: from disk, or done now and put there; ``Dropped`` becomes a record too."""
    record = store.load(stage, kind)
    if record is None:
        try:
            record = await work()
        except Dropped as drop:
            record = kind(dropped=drop.reason, detail=drop.detail)
        store.save(stage, record)
    shop.report(stage, record.dropped or "kept")
    return record
