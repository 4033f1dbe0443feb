"""Both sides of a plan on one axis of time."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from headrace.planning.plan import Candidate

_COLOURS = {"update": "#2f6f9f", "wait": "#e3e6ea", "sync": "#c8553d"}
_VERSIONS = 2
"""Versions that are drawn, the last ones."""


def draw(candidate: Candidate, path: Path) -> None:
    """Learner, rows on the engines and complete groups over the last versions; the file's ending gives the format.

    Raises:
        ValueError: the split does not fit and was not simulated, or the ending is none that matplotlib writes.
        OSError: the file cannot be written.
    """
    simulation = candidate.simulation
    if simulation is None:
        raise ValueError("plan: nothing to draw, the split does not fit")
    begin = max(simulation.start, simulation.end - _VERSIONS * simulation.version_seconds)
    figure, (learner, rows, groups) = plt.subplots(3, 1, figsize=(10, 5.2), sharex=True, height_ratios=(1, 2, 2), layout="constrained")
    for kind, colour in _COLOURS.items():
        spans = [
            (max(start, begin) - begin, end - max(start, begin))
            for name, start, end in simulation.learner_spans
            if name == kind and end > begin
        ]
        learner.broken_barh(spans, (0, 1), facecolors=colour, label=kind)
    learner.set(yticks=[], ylabel="learner")
    learner.legend(ncols=len(_COLOURS), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    split = candidate.split
    learner.set_title(
        f"{split.ranks} learner + {split.rollout_gpus} rollout GPUs: learner idle {simulation.learner_idle:.0%}, "
        f"engines idle {simulation.engine_idle:.0%}",
        loc="left",
    )
    points = [point for point in simulation.engine_track if point[0] >= begin]
    times = [time - begin for time, _, _ in points]
    rows.fill_between(times, [running for _, running, _ in points], step="post", color="#6a9f58")
    rows.set(ylabel="rows drawing", ylim=(0, None))
    groups.step(times, [waiting for _, _, waiting in points], where="post", color="#2f6f9f")
    groups.set(ylabel="groups complete,\nnot trained", ylim=(0, None), xlabel="seconds", xlim=(0, simulation.end - begin))
    figure.savefig(path, dpi=130)
    plt.close(figure)
