"""Scripts of the small world, the words for what they hold, and the frames they become."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.questions.hopchain.records import Video
from headrace.questions.hopchain.settings import WorldConfig
from headrace.records import Array
from headrace.streams import stream

PLACES = {  # RGB; any two differ by a score of at least 27 for the content detector, also after compression
    "desert": (220, 184, 91),
    "forest": (17, 80, 17),
    "sea": (22, 68, 160),
    "snow": (245, 245, 245),
    "night": (7, 7, 25),
    "street": (110, 110, 110),
    "meadow": (106, 200, 137),
    "cave": (60, 38, 27),
    "sunset": (240, 81, 24),
    "sky": (155, 212, 240),
    "heath": (130, 69, 130),
    "lava": (150, 0, 25),
}
COLOURS = {
    "red": (230, 30, 30),
    "blue": (40, 60, 230),
    "green": (30, 170, 60),
    "yellow": (240, 220, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond", "bar", "pillar")
SIDES = {"left": 0.27, "middle": 0.5, "right": 0.73}
ACTIONS = ("rises", "falls", "grows", "shrinks", "blinks")
OUTLINE = 2
_PREFIX = "scripted"


def sentence(place: str, colour: str, shape: str, side: str, action: str) -> str:
    """The caption of a scene."""
    return f"The {place} shows a {colour} {shape} {where(side)} that {action}."


def where(side: str) -> str:
    """A side with its preposition."""
    return f"{'in' if side == 'middle' else 'on'} the {side}"


@dataclass(frozen=True, slots=True)
class Scene:
    """One shot: a place with one shape in it that does something."""

    place: str
    shape: str
    colour: str
    side: str
    action: str
    seconds: float

    @property
    def caption(self) -> str:
        """The truth about it as one sentence."""
        return sentence(self.place, self.colour, self.shape, self.side, self.action)


@dataclass(frozen=True)
class Script:
    """The scenes of a video, in order; no two have both place and shape in common."""

    scenes: tuple[Scene, ...]

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """Where the scenes begin and, last, where the video ends; seconds."""
        return tuple(float(end) for end in np.cumsum([0.0, *(scene.seconds for scene in self.scenes)]))

    def at(self, time: float) -> Scene:
        """The scene on screen."""
        position = int(np.searchsorted(self.bounds, time, side="right")) - 1
        return self.scenes[min(max(position, 0), len(self.scenes) - 1)]

    def frames(self, size: int, fps: int) -> Iterator[Array]:
        """RGB frames [size, size, 3] uint8."""
        for scene in self.scenes:
            count = round(scene.seconds * fps)
            for index in range(count):
                yield draw(scene, index / max(1, count - 1), index / fps, size)


class World:
    """Videos by number; the same configuration and seed always give the same ones."""

    def __init__(self, config: WorldConfig, seed: int) -> None:
        if config.shots > len(PLACES) * len(SHAPES):
            raise ValueError(f"videos.shots = {config.shots}: place and shape tell scenes apart, so at most {len(PLACES) * len(SHAPES)}")
        self.config, self.seed = config, seed

    def video_id(self, number: int) -> str:
        return f"{_PREFIX}-{number:06d}"

    def script(self, video: Video) -> Script:
        """The script behind a video of this world."""
        config = self.config
        rng = stream(self.seed, "hopchain/script", query_id=video.id)
        places, shapes = list(PLACES), list(SHAPES)
        order = _places(rng, config.shots)
        of_place = {place: rng.permutation(len(shapes)) for place in range(len(places))}
        seen = [0] * len(places)
        scenes = []
        for place in order:
            shape = shapes[int(of_place[place][seen[place]])]
            seen[place] += 1
            low, high = config.shot_seconds
            frames = int(rng.integers(round(low * config.fps), round(high * config.fps) + 1))
            colour, side, action = (str(rng.choice(list(words))) for words in (COLOURS, SIDES, ACTIONS))
            scenes.append(Scene(places[place], shape, colour, side, action, frames / config.fps))
        return Script(tuple(scenes))


def _places(rng: np.random.Generator, count: int) -> list[int]:
    """Every place once before any comes again, never one twice in a row: that cut could not be seen."""
    order: list[int] = []
    while len(order) < count:
        turn = rng.permutation(len(PLACES)).tolist()
        if order and turn[0] == order[-1]:
            turn[0], turn[1] = turn[1], turn[0]
        order += turn
    return order[:count]


def draw(scene: Scene, progress: float, time: float, size: int) -> Array:
    """One frame [size, size, 3] uint8; ``progress`` runs from 0 to 1 over the scene."""
    picture = np.empty((size, size, 3), np.uint8)
    picture[:] = PLACES[scene.place]
    if scene.action == "blinks" and int(time * 2) % 2:
        return picture
    rows, columns = np.mgrid[0:size, 0:size] / (size - 1)
    height = {"rises": 0.72 - 0.44 * progress, "falls": 0.28 + 0.44 * progress}.get(scene.action, 0.5)
    radius = {"grows": 0.08 + 0.14 * progress, "shrinks": 0.22 - 0.14 * progress}.get(scene.action, 0.15)
    y, x = rows - height, columns - SIDES[scene.side]
    border = OUTLINE / size
    light = sum(PLACES[scene.place]) > 3 * 128
    picture[_inside(scene.shape, x, y, radius + border)] = (0, 0, 0) if light else (255, 255, 255)
    picture[_inside(scene.shape, x, y, radius)] = COLOURS[scene.colour]
    return picture


def _inside(shape: str, x: Array, y: Array, radius: float) -> Array:
    """Pixels of a shape around the origin."""
    distance, longest, sum_ = np.hypot(x, y), np.maximum(abs(x), abs(y)), abs(x) + abs(y)
    match shape:
        case "circle":
            return distance <= radius
        case "square":
            return longest <= 0.9 * radius
        case "triangle":
            return (y <= 0.8 * radius) & (y >= 2 * abs(x) - radius)
        case "cross":
            return (longest <= radius) & (np.minimum(abs(x), abs(y)) <= 0.35 * radius)
        case "ring":
            return (distance <= radius) & (distance >= 0.55 * radius)
        case "diamond":
            return sum_ <= 1.1 * radius
        case "bar":
            return (abs(x) <= radius) & (abs(y) <= 0.4 * radius)
        case "pillar":
            return (abs(x) <= 0.4 * radius) & (abs(y) <= radius)
    raise ValueError(f"unknown shape {shape!r}")
