"""The stream of weights has the names, shapes and values of an exported checkpoint, each once and in layer order."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from headrace.sync.source import ALIGNMENT, Entry, WeightSource, as_bytes, buckets
from tests.sync import models
from tests.sync.models import Learner


@pytest.fixture(scope="module", params=["tied", "untied", "qwen2_5_vl", "qwen3_vl"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return models.vision(path, request.param) if request.param in models.FAMILIES else models.qwen3(path, tied=request.param == "tied")


def test_names_and_values_are_those_of_the_files(directory):
    sent = dict(WeightSource(Learner(directory).model, torch.float32))
    saved = load_file(directory / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_renamed_weights_get_the_names_of_their_files_back(tmp_path):
    """Qwen2.5-VL's files say ``visual.…`` and ``model.layers.…``, transformers' model ``model.visual.…`` and ``model.language_model.…``."""
    learner = Learner(models.vision(tmp_path, "qwen2_5_vl"))
    names = {entry.name for entry in WeightSource(learner.model, torch.float32).entries()}
    assert {name.split(".")[0] for name in names} == {"model", "visual"}
    assert not names & {name for name in learner.model.state_dict() if "visual" in name}


def test_entries_say_what_a_pass_yields(directory):
    source = WeightSource(Learner(directory).model, torch.bfloat16)
    found = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert found == source.entries()
    assert {entry.dtype for entry in found} == {torch.bfloat16}


def test_layers_come_one_after_another(directory):
    layers = [entry.name.split(".layers.")[1].split(".")[0] for entry in WeightSource(Learner(directory).model, torch.float32).entries()
              if ".layers." in entry.name]  # fmt: skip
    assert layers == sorted(layers)


def test_wrappers_leave_no_trace_in_names(tmp_path):
    learner = Learner(models.qwen3(tmp_path, tied=True))
    plain = [entry.name for entry in WeightSource(learner.model, torch.float32).entries()]
    compiled = torch.nn.Module()  # as torch.compile and activation checkpointing wrap
    compiled._orig_mod = torch.nn.Module()
    compiled._orig_mod._checkpoint_wrapped_module = learner.model.model.layers[0]
    learner.model.model.layers[0] = compiled
    assert any("_orig_mod" in name for name, _ in learner.model.named_parameters())
    assert [entry.name for entry in WeightSource(learner.model, torch.float32).entries()] == plain


def test_drain_takes_the_rest_of_a_pass_and_nothing_of_one_that_is_over(tmp_path):
    source = WeightSource(Learner(models.qwen3(tmp_path, tied=True)).model, torch.float32)
    taken = []
    whole = source._named_weights
    source._named_weights = lambda *, merge: (taken.append(name) or (name, tensor) for name, tensor in whole(merge=merge))
    count = len(list(source))
    source.drain()
    assert len(taken) == count + 1, "lm_head is tied and passed over"
    taken.clear()
    next(iter(source))
    source.drain()
    assert len(taken) == count + 1
    taken.clear()
    source.drain()
    assert len(taken) == count + 1, "a rank that sends nothing takes the whole pass"


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(1, 1000))
def test_buckets_keep_order_and_limit(sizes, limit):
    entries = [Entry(str(index), torch.uint8, (size,)) for index, size in enumerate(sizes)]
    parts = buckets(entries, limit)
    assert [entry for part in parts for entry in part] == entries
    for part in parts:
        starts = -(-torch.tensor([entry.nbytes for entry in part[:-1]]) // ALIGNMENT) * ALIGNMENT
        assert len(part) == 1 or int(starts.sum()) + part[-1].nbytes <= limit
    for one, other in itertools.pairwise(parts):
        assert sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in one) + other[0].nbytes > limit, (
            "a bucket is filled before the next"
        )


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.arange(6).view(2, 3).T, torch.ones(4, dtype=torch.bfloat16), torch.zeros(0)])
def test_bytes_are_the_rows_of_a_tensor(tensor):
    again = torch.frombuffer(bytearray(as_bytes(tensor)), dtype=tensor.dtype) if tensor.numel() else torch.zeros(0)
    assert torch.equal(again, tensor.reshape(-1))
