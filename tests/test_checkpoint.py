"""Save, resume, export: nothing half-written is taken, nothing old is lost, a resumed run repeats to the bit."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import checkpoint
from headrace import checkpoint_files as files
from headrace.checkpoint import CheckpointError
from headrace.encoding import Encoder
from headrace.policy.score import packed_rows
from tests.policy.learner_cases import make_config, make_learner, moved, picture_batch, random_batch, tiny_model, tiny_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def learner(model):
    return make_learner(make_config(model))


def state(learner):
    """Everything a run depends on, as flat bits by name."""
    tensors = learner.state_dict()
    flat = {f"model.{name}": tensor for name, tensor in tensors["model"].items()}
    flat |= {f"{name}.{key}": tensor for name, entry in tensors["optimizer"].items() for key, tensor in entry.items()}
    return {name: tensor.detach().clone() for name, tensor in flat.items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", ["text", "bf16", "vision"])
def test_four_steps_are_two_and_two(model, tmp_path, case):
    """run(4) == run(2) + restore + run(2), weights and moments, bit for bit; also where bf16 parameters have fp32 masters."""
    directory = tiny_vision_model(tmp_path / "visual") if case == "vision" else model
    kind = {"dtype": "bfloat16" if case == "bf16" else "float32", "train_vision": case == "vision"}
    config = make_config(directory, model=kind, loss={"kl_coef": 0.1}, learner={"updates_per_batch": 2})
    batches = [picture_batch(directory, seed, config.loss) if case == "vision" else random_batch(seed, config.loss) for seed in range(4)]
    whole = make_learner(config)
    metrics = [whole.update(batch) for batch in batches]
    first = make_learner(config)
    for batch in batches[:2]:
        first.update(batch)
    checkpoint.save(tmp_path / "checkpoints", 2, first, {"ledger": {"cursor": 5}})
    second = make_learner(config)
    restored = checkpoint.restore(tmp_path / "checkpoints", second)
    assert (restored.step, restored.extra, second.updates) == (2, {"ledger": {"cursor": 5}}, 4)
    assert same(state(first), state(second))
    again = [second.update(batch) for batch in batches[2:]]
    assert same(state(whole), state(second))
    assert all(map(torch.equal, whole.policy.parameters(), second.policy.parameters()))
    timeless = [{k: v for k, v in step.items() if not k.startswith("time/")} for step in [*metrics[2:], *again]]
    assert timeless[:2] == timeless[2:]


def test_nothing_to_restore(learner, tmp_path):
    assert checkpoint.restore(tmp_path / "absent", learner) is None
    assert checkpoint.latest(tmp_path) is None


def test_the_newest_stay_and_latest_names_the_last(learner, tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, learner, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003", "step_000004"]
    assert checkpoint.latest(tmp_path).name == "step_000004"
    assert checkpoint.save(tmp_path, 4, learner, {"again": True}, keep=2).name == "step_000004-1"
    assert checkpoint.restore(tmp_path, learner).extra == {"again": True}


def test_a_half_written_checkpoint_is_never_taken(learner, tmp_path):
    whole = checkpoint.save(tmp_path, 1, learner, {"step": 1})
    for name, leave in (("step_000002", "state.json"), ("step_000003", ".metadata"), ("step_000004", files.SUMS)):
        shutil.copytree(whole, tmp_path / name)
        (tmp_path / name / leave).unlink()
    (tmp_path / ".saving-step_000005").mkdir()
    (tmp_path / "latest").write_text("step_000003\n")
    assert checkpoint.latest(tmp_path) == whole
    assert checkpoint.restore(tmp_path, learner).step == 1
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path) == whole
    checkpoint.save(tmp_path, 6, learner, {})
    assert not list(tmp_path.glob(".saving-*"))


def test_a_damaged_checkpoint_is_one_line(learner, tmp_path):
    path = checkpoint.save(tmp_path, 1, learner, {})
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"^checkpoint {path} cannot be read \(.+\)$"):
        checkpoint.restore(tmp_path, learner)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^checkpoint {path} cannot be read \(.+\)$"):
        checkpoint.restore(tmp_path, learner)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", files.SUMS])
def test_one_flipped_bit_is_found_and_the_checkpoint_before_it_is_taken(model, learner, tmp_path, name):
    """Bits that torch would load without a word: the weights themselves, the index, our own state, the digests."""
    for step in (1, 2):
        learner.update(random_batch(step, learner.config.loss))
        path = checkpoint.save(tmp_path, step, learner, {"step": step})
        if step == 1:
            first = state(learner)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    resumed = make_learner(make_config(model))
    restored = checkpoint.restore(tmp_path, resumed)
    assert (restored.step, restored.extra, resumed.updates) == (1, {"step": 1}, 1)
    assert same(first, state(resumed))
    (line,) = restored.damaged
    assert re.fullmatch(rf"checkpoint {path} cannot be read \(.+{files.SUMS}\)", line)
    shutil.rmtree(tmp_path / "step_000001")
    with pytest.raises(CheckpointError, match=rf"^checkpoint {path} cannot be read"):
        checkpoint.restore(tmp_path, resumed)


def test_coreutils_agrees_with_the_digests(learner, tmp_path):
    path = checkpoint.save(tmp_path, 1, learner, {})
    assert subprocess.run(["sha256sum", "--check", "--quiet", files.SUMS], cwd=path, check=False).returncode == 0


def test_an_index_that_would_run_code_is_refused(learner, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    path = checkpoint.save(tmp_path, 1, learner, {})
    (path / ".metadata").write_bytes(pickle.dumps(Trap()))
    files.write_sums(path, files.digests(file for file in path.iterdir() if file.name != files.SUMS))  # whoever doctors one doctors both
    with pytest.raises(CheckpointError, match=r"its index names .* which no index needs"):
        checkpoint.restore(tmp_path, learner)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied")])
@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync"])
def test_a_failed_save_is_one_line_and_costs_no_checkpoint(learner, tmp_path, monkeypatch, fault, call):
    first = checkpoint.save(tmp_path, 1, learner, {"step": 1})
    before = {path.name: path.read_bytes() for path in first.iterdir()}

    def fail(*_args, **_options):
        raise fault

    monkeypatch.setattr(*{"mkdir": (Path, "mkdir"), "rename": (Path, "rename"), "fsync": (os, "fsync")}[call], fail)
    with pytest.raises(CheckpointError, match=rf"^checkpoint {tmp_path}/step_000002 cannot be written \({fault.strerror}\)$"):
        checkpoint.save(tmp_path, 2, learner, {})
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]


def test_a_full_disk_for_real(learner, tmp_path):
    """The kernel refuses bytes beyond a limit, in torch's own writer as on a full disk."""
    first = checkpoint.save(tmp_path, 1, learner, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(CheckpointError, match=r"^checkpoint .*/step_000002 cannot be written \(.+\)$"):
            checkpoint.save(tmp_path, 2, learner, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.restore(tmp_path, learner).step == 1


def test_a_checkpoint_of_another_model_names_the_first_difference(learner, tmp_path, tmp_path_factory):
    wide = make_learner(make_config(tiny_model(tmp_path_factory.mktemp("wide"), hidden=64)))
    deep = make_learner(make_config(tiny_model(tmp_path_factory.mktemp("deep"), layers=3)))
    path = checkpoint.save(tmp_path, 1, learner, {})
    with pytest.raises(
        CheckpointError, match=rf"^checkpoint {path} belongs to another model: \S*embed\S* is \[80, 64\] here, .* \[80, 32\]$"
    ):
        checkpoint.restore(tmp_path, wide)
    with pytest.raises(CheckpointError, match=r"belongs to another model: \S*layers\.2\S* is .* here, the checkpoint has no such tensor$"):
        checkpoint.restore(tmp_path, deep)
    checkpoint.save(tmp_path / "deep", 1, deep, {})
    with pytest.raises(CheckpointError, match=r"belongs to another model: it has \S*layers\.2\S* .*, the model has not$"):
        checkpoint.restore(tmp_path / "deep", learner)


def test_killed_while_saving(learner, tmp_path):
    """A process that dies between the data and the rename leaves the earlier checkpoint as the one to resume from."""
    first = checkpoint.save(tmp_path, 1, learner, {})
    rename = Path.rename

    def die(path, target):
        return os.kill(os.getpid(), signal.SIGKILL) if path.name.startswith(".saving") else rename(path, target)

    child = os.fork()
    if not child:
        Path.rename = die
        try:
            checkpoint.save(tmp_path, 2, learner, {})
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (tmp_path / ".saving-step_000002" / "state.json").exists()
    assert checkpoint.latest(tmp_path) == first
    checkpoint.save(tmp_path, 2, learner, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001", "step_000002"]


def test_transformers_loads_what_is_exported(model, learner, tmp_path):
    """Same logits, tied head, same tokenizer; the export of a run replaces an older one."""
    moved(learner)
    encoder = Encoder.load(model, think_prefill=True, system_prompt=None, max_prompt_tokens=99)
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    assert checkpoint.export(learner.policy, encoder, target) == target
    assert not (target / "old").exists()
    exported = AutoModelForCausalLM.from_pretrained(target)
    assert exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()
    batch = random_batch(0, learner.config.loss, groups=1, size=1)
    with torch.no_grad():
        ours = learner.policy(packed_rows(batch, torch.device("cpu")), lambda hidden, weight: hidden @ weight.T)
        theirs = exported(torch.from_numpy(batch.token_ids)[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(target).get_vocab() == encoder.tokenizer.get_vocab()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
