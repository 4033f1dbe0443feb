"""``headrace plan CONFIG``: memory, step time and the best split of the GPUs, before a run starts."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file, e.g. configs/cge_qwen3vl_8b.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, e.g. schedule.staleness=1")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; by default twice those that engine.rollout_ranks fills, or 1")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node")] = 8,
    device: Annotated[Literal["h100", "h200", "cpu"], typer.Option(help="Device; a cpu needs --rates")] = "h100",
    workload: Annotated[Path | None, typer.Option(help="YAML file: tokens of prompts and responses (docs/planning.md)")] = None,
    rates: Annotated[Path | None, typer.Option(help="YAML file: measured rates of one server and one learner rank")] = None,
    picture: Annotated[Path | None, typer.Option(help="Timeline of both sides to write, e.g. plan.png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Simulate the schedule on every split of the GPUs. Nothing is trained and no GPU is needed."""
    from rich.console import Console

    from headrace.config import load_config
    from headrace.planning.devices import DEVICES
    from headrace.planning.picture import draw
    from headrace.planning.plan import default_nodes, make_plan
    from headrace.planning.rates import Rates
    from headrace.planning.report import tables, to_json
    from headrace.planning.shape import shape_of
    from headrace.planning.workload import Workload

    loaded = load_config(config, overrides or ())
    console = Console(stderr=True)
    with console.status("reading the model") as status:
        made = make_plan(
            loaded,
            shape_of(loaded),
            Workload.assumed(loaded) if workload is None else Workload.read(workload),
            DEVICES.get(device),
            nodes=nodes or default_nodes(loaded, gpus_per_node),
            gpus_per_node=gpus_per_node,
            rates=None if rates is None else Rates.read(rates),
            tick=lambda text: status.update(f"simulating {text}"),
        )
    shown = made.configured or made.best
    if picture is not None and shown is not None:
        draw(shown, picture)
    if as_json:
        print(json.dumps(to_json(made), indent=2))
    else:
        Console(width=max(Console().width, 120)).print(tables(made, assumed=workload is None))
