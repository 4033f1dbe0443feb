"""``python -m headrace.bench kernels``: the row operations against their floors and against what else is installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from headrace.bench import accuracy, cases, memory, table, works
from headrace.bench.cases import Rows, Size
from headrace.bench.operations import OPERATIONS, Operation
from headrace.bench.record import Measured, Memory, Missing, Record
from headrace.bench.timing import Timing, interleaved

BUDGETS = {"floor": 2.0, "ours": 2.0, "peer": 0.5}
"""Seconds of timed calls for each piece of work, beyond the least number of rounds; four times as much with ``--full``."""
MEMORY_TOKENS = (256, 1024, 4096)
MEMORY_VOCABULARY = 8192
MEMORY_WIDTH = 64
"""What the peak is made of is logits; a narrow head shows as much in a fraction of the time, and by default so does a small vocabulary."""
FREE_SHARE = 0.7
"""Of the free memory, what a peer may want before it is left out."""


def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one")] = "",
    operation: Annotated[list[str] | None, typer.Option(help=f"Only these; repeatable: {', '.join(OPERATIONS)}")] = None,
    sizes: Annotated[str, typer.Option(metavar="TxDxV,…", help="Tokens x width x vocabulary instead of the usual grid")] = "",
    full: Annotated[
        bool, typer.Option("--full", help="The whole grid, the reference, compiled peers, more rounds; hours on two cores")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also peers that need torch.compile: half a minute each at first")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to measure others' code")] = True,
    peaks: Annotated[bool, typer.Option("--memory/--no-memory", help="Whether to measure peak memory")] = True,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's own number")] = 0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON")] = None,
    picture_out: Annotated[Path | None, typer.Option("--picture", help="Draw shares of the floor and peak memory, e.g. bench.png")] = None,
) -> None:
    """Check every result against float64, then time it against matrix products and reads of the same size in this process.

    Peers are measured when they can be imported; one that cannot is named with the reason. Times are wall-clock, taken in turn.
    """
    if threads:
        torch.set_num_threads(threads)
    plan = Plan(
        device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        operations=[_operation(name) for name in operation or OPERATIONS],
        sizes=_sizes(sizes),
        full=full,
        compiled=compiled or full,
        peers=peers,
        memory=peaks,
    )
    console = Console()
    record = run(plan, console)
    table.show(record, console)
    if json_out is not None:
        record.write(json_out)
    if picture_out is not None:
        from headrace.bench.picture import draw

        draw(record, picture_out)


def _operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise ValueError(f"--operation: expected one of {', '.join(OPERATIONS)}, got {name!r}")
    return OPERATIONS[name]


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(Size.parse(each) for each in text.split(",")) if text else ()


@dataclass
class Plan:
    """What to measure."""

    device: torch.device
    operations: Sequence[Operation]
    sizes: Sequence[Size] = ()
    full: bool = False
    compiled: bool = False
    peers: bool = True
    memory: bool = True

    def grid(self, operation: Operation) -> list[Size]:
        """Sizes of an operation; one that has no matrix product is measured once per tokens and vocabulary."""
        usual = {
            ("cpu", False): cases.CPU_SIZES,
            ("cpu", True): cases.CPU_FULL,
            ("cuda", False): cases.GPU_SIZES,
            ("cuda", True): cases.GPU_FULL,
        }
        sizes = self.sizes or usual[self.device.type, self.full]
        if operation.makes is not Rows:
            return list(sizes)
        return list({(size.tokens, size.vocabulary): size for size in sizes}.values())


def run(plan: Plan, console: Console) -> Record:
    """Measure.

    Raises:
        WrongResultError: one of our implementations misses float64; peers are reported with their errors.
    """
    name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu"
    record = Record(name, torch.get_num_threads())
    with console.status("") as status:
        for operation in plan.operations:
            for size in plan.grid(operation):
                status.update(f"{operation.name} {size}")
                _measure(plan, operation, size, record)
        if plan.memory:
            status.update("peak memory")
            _peaks(plan, record)
    return record


def _measure(plan: Plan, operation: Operation, size: Size, record: Record) -> None:
    """One operation at one size: check, then time all in turn."""
    made = works.make(operation, size, plan.device)
    floor = operation.floor
    timed: dict[str, Callable[[], object]] = {}
    errors: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for name in works.ours(plan.device, reference=plan.full):
        work = works.own_work(operation, name, made)
        errors[name] = accuracy.errors(made, work)
        accuracy.gate(f"{operation.name} {size} by {name}", errors[name], getattr(made, "dtype", torch.float32))
        timed[name] = work
    ours = set(timed)
    for peer in works.peers(operation, plan.compiled) if plan.peers else ():
        try:
            _check_room(peer.matrices, size, plan.device)
            work = peer.build(made)
            errors[peer.name] = accuracy.errors(made, work)
        except Exception as error:  # whatever a peer raises, the others are measured
            record.missing.append(Missing(operation.name, peer.name, str(size), _reason(error)))
            continue
        timed[peer.name], notes[peer.name] = work, peer.note
    timed[floor] = operation.floor_work(made)
    timed[floor]()
    kinds = {name: "floor" if name == floor else "ours" if name in ours else "peer" for name in timed}
    timings = interleaved(timed, {name: BUDGETS[kind] * (4 if plan.full else 1) for name, kind in kinds.items()}, plan.device)
    for name in (floor, *(name for name in timed if name != floor)):
        row = _row(operation, size, name, kinds[name], timings, errors.get(name, {}), notes.get(name, ""), plan.device)
        record.measured.append(row)


def _row(
    operation: Operation,
    size: Size,
    name: str,
    kind: str,
    timings: dict[str, Timing],
    errors: dict[str, float],
    note: str,
    device: torch.device,
) -> Measured:
    timing, floor = timings[name], timings[operation.floor]
    amount, unit = operation.traffic(size)
    serves = kind == "ours" and name == works.ours(device)[0]
    return Measured(
        operation=operation.name,
        tokens=size.tokens,
        width=size.width,
        vocabulary=size.vocabulary,
        name=name,
        kind=kind,
        best_s=timing.best,
        median_s=timing.median,
        calls=timing.calls,
        ratio=timing.best / floor.best,
        ratio_median=timing.median / floor.median,
        goal=operation.goals.get(device.type) if serves else None,
        note=note,
        errors=errors,
        speed=f"{amount / timing.best:,.0f} {unit}" if kind == "floor" else "",
    )


def _peaks(plan: Plan, record: Record) -> None:
    """Peak memory of the implementation that serves and of every peer that was timed, over T."""
    timed = {(row.operation, row.name): row.kind for row in record.measured if row.kind == "peer"}
    default = works.ours(plan.device)[0]
    vocabulary = max(
        (size.vocabulary for size in plan.sizes), default=151_936 if plan.full or plan.device.type == "cuda" else MEMORY_VOCABULARY
    )
    tokens = sorted({size.tokens for size in plan.sizes}) or MEMORY_TOKENS
    tasks = []
    for operation in plan.operations:
        matrices = {peer.name: peer.matrices for peer in works.peers(operation, plan.compiled)}
        for name in (default, *(name for owner, name in timed if owner == operation.name)):
            for count in tokens:
                size = Size(count, MEMORY_WIDTH, vocabulary)
                try:
                    _check_room(matrices.get(name, 0), size, plan.device)
                except MemoryError as error:
                    record.missing.append(Missing(operation.name, f"{name} (memory)", str(size), str(error)))
                    continue
                tasks.append((operation.name, name, size))
    for owner, name, size, extra in memory.measure(tasks, plan.device, torch.get_num_threads()):
        if isinstance(extra, str):
            record.missing.append(Missing(owner, f"{name} (memory)", str(size), extra))
        else:
            kind = timed.get((owner, name), "ours")
            record.memory.append(Memory(owner, size.tokens, size.width, size.vocabulary, name, kind, extra))


def _check_room(matrices: int, size: Size, device: torch.device) -> None:
    """Raise MemoryError where so many fp32 logits matrices, and one for the floor, would not fit."""
    wanted = 4 * size.logits * (matrices + 1)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if free is not None and wanted > FREE_SHARE * free:
        raise MemoryError(f"would take {wanted / 1e9:.1f} of {free / 1e9:.1f} GB that are free")


def _free_memory() -> int | None:
    """Bytes the system can still give, where it tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _reason(error: Exception) -> str:
    """One short line."""
    text: Any = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 100 else text[:97] + "…"
