"""Videos of the small world as files."""

from headrace.questions.hopchain import film
from headrace.questions.hopchain.records import Video
from headrace.questions.hopchain.world.script import World


class Studio:
    """Renders a video when it is asked for and not there yet."""

    def __init__(self, world: World) -> None:
        self.world = world

    def make(self, video: Video) -> None:
        if video.path.exists():
            return
        video.path.parent.mkdir(parents=True, exist_ok=True)
        config = self.world.config
        film.encode(list(self.world.script(video).frames(config.size, config.fps)), video.path, config.fps)
