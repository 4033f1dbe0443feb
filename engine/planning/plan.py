"""A run planned: every split of the GPUs simulated, the fastest that fits, and what more GPUs would bring."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.config import Config, LocalEngineConfig
from headrace.planning.devices import Device
from headrace.planning.memory import Memory, learner_memory, rows_at_once, server_memory
from headrace.planning.rates import Rates, Split, first_wave, roofline
from headrace.planning.setting import Setting
from headrace.planning.shape import Shape
from headrace.planning.simulate import Simulation, simulate
from headrace.planning.workload import Workload
from headrace.schedule import max_lag, questions_per_version, slots

SCALES = (8, 64, 1024)
"""GPUs to which a run is scaled."""
_LARGE = 256  # GPUs from which fewer versions are simulated, each of many groups


@dataclass(frozen=True, slots=True)
class Candidate:
    """One split and what it comes to."""

    split: Split
    rates: Rates
    rows: int
    """Responses a server draws at once."""
    learner: Memory | None
    """One GPU of the learner; None on devices whose memory is not known."""
    server: Memory | None
    cache_tokens: int
    """Key-value cache of one server, in tokens; 0 where it is not known."""
    simulation: Simulation | None
    """None where it does not fit."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The same run on another number of GPUs: groups per batch and both sides grow alike."""

    gpus: int
    questions_per_step: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Plan:
    """What `headrace plan` shows."""

    config: Config
    shape: Shape
    device: Device | None
    workload: Workload
    candidates: tuple[Candidate, ...]
    best: Candidate | None
    """Least seconds per batch among those that fit."""
    configured: Candidate | None
    """The split that the configuration names."""
    scaled: tuple[Scaled, ...]
    questions_per_version: int
    slots: int
    max_lag: int


def make_plan(
    config: Config,
    shape: Shape,
    workload: Workload,
    device: Device | None,
    *,
    nodes: int,
    gpus_per_node: int,
    rates: Rates | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Simulate every split of ``nodes`` x ``gpus_per_node``.

    Args:
        device: None for one without a data sheet, such as a CPU; then ``rates`` must be given.
        rates: measured on one server and one learner rank; None takes the device's roofline.
        tick: told what is being simulated.

    Raises:
        ValueError: neither device nor rates, or the GPUs cannot be dealt out.
    """
    if device is None and rates is None:
        raise ValueError("plan: a CPU has no data sheet; give measured rates with --rates (docs/planning.md)")

    def candidate(split: Split, setup: Config) -> Candidate:
        tick(f"{split.ranks} learner + {split.rollout_gpus} rollout GPUs")
        return _candidate(setup, shape, workload, device, split, rates)

    candidates = tuple(candidate(split, config) for split in splits(config, nodes, gpus_per_node))
    fitting = [item for item in candidates if item.simulation is not None]
    best = min(fitting, key=_batch_seconds, default=None)
    scaled: tuple[Scaled, ...] = ()
    if device is not None and best is not None and not isinstance(config.engine, LocalEngineConfig):
        scaled = tuple(_scaled(config, best, gpus, gpus_per_node, nodes * gpus_per_node, candidate) for gpus in SCALES)
    wanted = getattr(config.engine, "rollout_ranks", 0)
    configured = next((item for item in candidates if wanted and item.split.rollout_gpus == wanted), None)
    return Plan(
        config, shape, device, workload, candidates, best, configured, scaled, questions_per_version(config), slots(config), max_lag(config)
    )


def default_nodes(config: Config, gpus_per_node: int) -> int:
    """As many learner nodes as the configured rollout ranks fill; one where they do not fill any."""
    return max(1, 2 * (getattr(config.engine, "rollout_ranks", 0) // gpus_per_node))


def splits(config: Config, nodes: int, gpus_per_node: int) -> list[Split]:
    """Whole nodes to either side; on one node, whole servers. The embedded engine shares the learner's GPUs.

    Raises:
        ValueError: there is no GPU for one of the sides.
    """
    total = nodes * gpus_per_node
    if isinstance(config.engine, LocalEngineConfig):
        return [Split(total, 1, total, gpus_per_node, nodes)]
    tensor_parallel = config.engine.tensor_parallel
    shares = [gpus_per_node * count for count in range(1, nodes)] if nodes > 1 else list(range(tensor_parallel, total, tensor_parallel))
    shares = [share for share in shares if share >= tensor_parallel]
    if not shares:
        raise ValueError(f"plan: {total} GPUs leave none to learn beside a server of engine.tensor_parallel = {tensor_parallel}")
    if len(shares) > 12:
        shares = shares[:: -(-len(shares) // 12)]
    return [Split(total - share, share // tensor_parallel, share, gpus_per_node, nodes) for share in shares]


def setting_of(config: Config, workload: Workload, rates: Rates, split: Split, rows: int) -> Setting:
    """What is simulated for a split."""
    return Setting(
        batch=config.run.questions_per_step,
        sync_interval=config.schedule.sync_interval,
        slots=slots(config),
        group_size=config.sampling.group_size,
        first_wave=first_wave(config),
        max_tokens=config.sampling.max_tokens,
        updates=config.learner.updates_per_batch,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        servers=split.servers,
        rows=rows,
        ranks=split.ranks,
        rates=rates,
        workload=workload,
    )


def _candidate(config: Config, shape: Shape, workload: Workload, device: Device | None, split: Split, measured: Rates | None) -> Candidate:
    rates = measured
    if rates is None:
        assert device is not None
        rates = roofline(config, shape, workload, device, split)
    learner = server = None
    cache, rows = 0, config.sampling.batch_rows
    if not isinstance(config.engine, LocalEngineConfig):
        rows = config.engine.max_num_seqs
        if device is not None:
            server, cache = server_memory(config, shape, device)
            mean = workload.mean_response(first_wave(config), config.sampling.group_size)
            rows = rows_at_once(config, cache, workload.prompt_tokens, mean, first_wave(config))
    if device is not None:
        learner = learner_memory(config, shape, device, split.ranks)
    fits = rows > 0 and all(memory is None or memory.fits for memory in (learner, server))
    versions = (2, 1) if split.ranks + split.rollout_gpus >= _LARGE else (6, 2)
    simulation = None
    if fits:
        simulation = simulate(setting_of(config, workload, rates, split, rows), versions=versions[0], warm_up=versions[1])
    return Candidate(split, rates, rows, learner, server, cache, simulation)


def _scaled(
    config: Config, best: Candidate, gpus: int, gpus_per_node: int, base: int, candidate: Callable[[Split, Config], Candidate]
) -> Scaled:
    """Weak scaling: the best split's proportion, and groups per batch, slots and GPUs in the same proportion."""
    assert not isinstance(config.engine, LocalEngineConfig)
    unit = gpus_per_node if gpus > gpus_per_node else config.engine.tensor_parallel
    share = best.split.rollout_gpus / (best.split.rollout_gpus + best.split.ranks)
    rollout = min(max(round(share * gpus / unit), 1) * unit, gpus - unit)
    nodes = max(1, gpus // gpus_per_node)
    questions = max(1, round(config.run.questions_per_step * gpus / base))
    grown = config.model_copy(update={"run": config.run.model_copy(update={"questions_per_step": questions})})
    split = Split(gpus - rollout, rollout // config.engine.tensor_parallel, rollout, gpus_per_node, nodes)
    return Scaled(gpus, questions, candidate(split, grown))


def _batch_seconds(candidate: Candidate) -> float:
    assert candidate.simulation is not None
    return candidate.simulation.batch_seconds
