"""From a file to captions: admission with the proxy, shots, one caption per shot."""

from collections.abc import Sequence

import numpy as np

from headrace.questions.hopchain import film
from headrace.questions.hopchain.records import Caption, Cost, Dropped, Footage, Shot
from headrace.questions.hopchain.roles import Refused
from headrace.questions.hopchain.segments import segment_shots
from headrace.questions.hopchain.state import VideoStore
from headrace.questions.hopchain.workshop import Admitted, Captioned, CaptionPiece, Segmented, Workshop, gather, proxy_of


async def admit(shop: Workshop, store: VideoStore) -> Admitted:
    """Long enough, readable, and with a proxy of all its frames."""
    config, video = shop.config, store.video
    if shop.make is not None:
        await shop.in_thread(shop.make, video)
    footage = await shop.in_thread(film.probe, video.path)
    if footage.duration < config.min_duration:
        raise Dropped("too_short", f"{video.path}: {footage.duration:.1f} s, expected at least {config.min_duration:g} s")
    proxy = proxy_of(shop, store)
    written = await shop.in_thread(film.write_proxy, video.path, footage, proxy, config.frames, config.max_pixels)
    if written != config.frames:
        proxy.unlink(missing_ok=True)
        raise Dropped("frames_lost", f"{video.path}: {written} of {config.frames} proxy frames could be decoded")
    return Admitted(footage=footage)


async def segment(shop: Workshop, store: VideoStore, footage: Footage | None) -> Segmented:
    assert footage is not None
    rules = shop.config.shots
    scenes = await shop.in_thread(film.find_scenes, store.video.path, rules.threshold, rules.min_scene_frames)
    spans = segment_shots(scenes, footage.duration, rules.min_seconds, rules.max_seconds, strict_max=rules.strict_max)
    return Segmented(shots=tuple(Shot(start=start, end=end) for start, end in spans))


async def caption(shop: Workshop, store: VideoStore, shots: Sequence[Shot]) -> Captioned:
    """Caption every shot that has no caption yet; enough of them must have text."""
    pieces = {piece.caption.shot: piece for piece in store.lines("captions", CaptionPiece)}

    async def one(number: int, shot: Shot) -> None:
        text, cost, detail = "", Cost(), ""
        try:
            frames = await shop.in_thread(
                film.shot_frames, store.video.path, shot, shop.config.captions.fps, shop.config.captions.max_pixels
            )
            if frames:
                reply = await shop.models.caption(store.video, shot, frames)
                text, cost = " ".join(reply.text.split()), reply.cost
        except (Dropped, Refused) as error:
            detail = str(error)
        piece = CaptionPiece(caption=Caption(shot=number, start=shot.start, end=shot.end, text=text), cost=cost, detail=detail)
        store.append("captions", piece)
        pieces[number] = piece

    await gather(*(one(number, shot) for number, shot in enumerate(shots) if number not in pieces))
    captions = tuple(pieces[number].caption for number in range(len(shots)))
    cost = sum((piece.cost for piece in pieces.values()), Cost())
    found = sum(bool(caption.text) for caption in captions)
    if found < shop.config.captions.min_share * len(shots) or not found:
        details = [piece.detail for piece in pieces.values() if piece.detail]
        detail = f"{found} of {len(shots)} shots have a caption" + (f"; {details[0]}" if details else "")
        return Captioned(dropped="too_few_captions", detail=detail[:400], cost=cost)
    return Captioned(captions=captions, cost=cost)


def readable(captions: Sequence[Caption], most: int) -> list[Caption]:
    """What writer and judge read: captions with text, evenly thinned to ``most``."""
    found = [caption for caption in captions if caption.text]
    if len(found) <= most:
        return found
    return [found[index] for index in np.linspace(0, len(found) - 1, most).round().astype(int)]
