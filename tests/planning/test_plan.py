"""Memory, splits and the command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import Config, load_config
from headrace.planning.devices import DEVICES
from headrace.planning.memory import learner_memory, rows_at_once, server_memory
from headrace.planning.plan import default_nodes, make_plan, splits
from headrace.planning.rates import Rates, Split, learner_seconds, roofline
from headrace.planning.shape import Shape, shape_of, trained_parameters
from headrace.planning.workload import Workload

ROOT = Path(__file__).parents[2]
PAPER_RUN = ROOT / "configs/cge_qwen3vl_8b.yaml"
WORKLOAD = ROOT / "examples/workload_video_hopchain.yaml"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(PAPER_RUN)


@pytest.fixture(scope="module")
def shape(config: Config) -> Shape:
    return shape_of(config)


def test_shape_is_the_released_models(shape: Shape) -> None:
    """Qwen3-VL-8B: 8,767,123,696 parameters; 36 layers x 8 heads x 128 x keys and values x 2 bytes = 147,456 bytes a token."""
    assert shape.parameters == 8_767_123_696
    assert shape.kv_bytes == 147_456


def test_server_memory_by_hand(config: Config, shape: Shape) -> None:
    """0.8 x 80 GB less 8.77 GB of weights (two GPUs share 17.5) and 3 GB leave 52.2 GB: 708,453 tokens at 73,728 bytes a GPU."""
    memory, tokens = server_memory(config, shape, DEVICES["h100"])
    assert memory.parts["key-value cache"] == pytest.approx(0.8 * 80e9 - 8_767_123_696 - 3e9)
    assert tokens == int((0.8 * 80e9 - 8_767_123_696 - 3e9) / 73_728) == 708_453
    assert rows_at_once(config, tokens, 4280, 810, 4) == 256
    assert rows_at_once(config, 100_000, 4000, 1000, 4) == 50


def test_learner_memory_shards_what_trains(config: Config, shape: Shape) -> None:
    """fp32 masters, gradients and two moments: 16 bytes a parameter over 16 ranks, or over the 8 of a node with model.shard."""
    sharded = learner_memory(config, shape, DEVICES["h100"], 16)
    states = ("weights (fp32 masters)", "gradients (fp32)", "moments")
    assert sum(sharded.parts[name] for name in states) == pytest.approx(shape.parameters)
    by_node = load_config(PAPER_RUN, ["model.shard=8"])
    assert sum(learner_memory(by_node, shape, DEVICES["h100"], 16).parts[name] for name in states) == pytest.approx(2 * shape.parameters)
    alone = learner_memory(config, shape, DEVICES["h100"], 1)
    assert not alone.fits


def test_frozen_parameters_cost_no_state(shape: Shape) -> None:
    frozen = load_config(PAPER_RUN, ["model.train_vision=false"])
    assert trained_parameters(frozen.model, shape) == shape.parameters - shape.vision
    adapters = load_config(PAPER_RUN, ["model.train_vision=false", "model.lora={rank: 8, layers: [q_proj]}"])
    assert trained_parameters(adapters.model, shape) == 36 * 8 * (4096 + 32 * 128)


def test_a_push_takes_the_weights_through_one_link(config: Config, shape: Shape) -> None:
    """17.5 GB at 70 % of 50 GB/s: 0.50 s, plus half a second of overhead, whatever the number of receivers up to their hops."""
    workload = Workload.read(WORKLOAD)
    small = roofline(config, shape, workload, DEVICES["h100"], Split(16, 8, 16, 8, 4)).sync
    large = roofline(config, shape, workload, DEVICES["h100"], Split(512, 256, 512, 8, 128)).sync
    assert small == pytest.approx(0.5 + 2 * shape.parameters / 35e9, rel=0.02)
    assert large < small + 0.2


def test_gathering_hides_behind_compute() -> None:
    rates = Rates(decode_step=0, decode_row=0, train_token=1e-3, gather=0.5, update=0.25)
    assert learner_seconds(rates, 8000, updates=2, ranks=4, micro_batch_tokens=1000) == 2 * (1.0 + 0.25)
    assert learner_seconds(rates, 800, updates=2, ranks=4, micro_batch_tokens=1000) == 2 * (0.5 + 0.25)


def test_splits_are_whole_nodes_or_whole_servers(config: Config) -> None:
    assert [(split.ranks, split.servers) for split in splits(config, 4, 8)] == [(24, 4), (16, 8), (8, 12)]
    assert [(split.ranks, split.servers) for split in splits(config, 1, 8)] == [(6, 1), (4, 2), (2, 3)]
    assert default_nodes(config, 8) == 4
    with pytest.raises(ValueError, match="2 GPUs leave none to learn"):
        splits(config, 1, 2)


def test_best_split_is_the_fastest_that_fits(config: Config, shape: Shape) -> None:
    """A costlier prompt stage moves the best split to the rollout side; on GPUs too small for the learner alone nothing is best."""
    quick = load_config(PAPER_RUN, ["run.questions_per_step=32", "learner.updates_per_batch=1", "sampling.max_tokens=4096"])
    base = Workload.read(WORKLOAD).model_copy(update={"at_limit": 0.0})
    cheap, dear = [
        make_plan(quick, shape, base.model_copy(update={"media_seconds": seconds}), DEVICES["h100"], nodes=4, gpus_per_node=8).best
        for seconds in (0.0, 20.0)
    ]
    assert cheap is not None
    assert dear is not None
    assert (cheap.split.rollout_gpus, dear.split.rollout_gpus) == (16, 24)
    full = load_config(PAPER_RUN, ["model.activation_checkpointing=false"])
    assert make_plan(full, shape, base, DEVICES["h100"], nodes=2, gpus_per_node=8).best is None


def test_command_prints_json_and_draws(tmp_path: Path) -> None:
    rates = tmp_path / "rates.yaml"
    rates.write_text("{decode_step: 0.01, decode_row: 0.0005, train_token: 0.0001, sync: 0.1}")
    picture = tmp_path / "plan.png"
    arguments = ["plan", str(ROOT / "configs/demo.yaml"), "run.cache=" + str(tmp_path), "--device", "cpu", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, [*arguments, "--rates", str(rates), "--picture", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["schedule"] == {"questions_per_version": 16, "slots": 16, "max_lag": 0}
    assert plan["best"]["simulation"]["learner_idle"] + plan["best"]["simulation"]["engine_idle"] == pytest.approx(1, abs=0.05)
    assert picture.stat().st_size > 5000


def test_what_a_user_gets_wrong_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "rates.yaml"
    bad.write_text("{decode_step: -1, train_token: 1}")
    config = str(ROOT / "configs/demo.yaml")
    cases = {
        ("plan", config, "--device", "cpu"): "give measured rates with --rates",
        ("plan", config, "--rates", str(bad)): "rates.yaml: decode_step: Input should be greater than or equal to 0",
        ("plan", config, "--workload", str(tmp_path / "none.yaml")): "cannot be read",
    }
    for arguments, words in cases.items():
        error = CliRunner().invoke(app, [*arguments]).exception
        assert isinstance(error, ValueError)
        assert words in str(error)
