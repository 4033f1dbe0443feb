"""LoRA: only adapters learn, the base is the reference, what leaves the engine is merged."""

import builtins
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headrace import checkpoint
from headrace.config import ConfigError, DirectoryModel, LoRAConfig, ModelConfig
from headrace.encoding import Encoder
from headrace.policy.adapters import adapted_layers, add_adapters, named_weights, without_adapters
from headrace.policy.model import Policy
from headrace.policy.score import packed_rows, score_batch
from tests.policy.learner_cases import BANNED, make_config, make_learner, moved, picture_batch, random_batch, tiny_model, tiny_vision_model

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def lora_config(directory, /, **sections):
    return make_config(directory, **{**sections, "model": {"lora": LORA, **sections.get("model", {})}})


def trained(config, steps=3):
    learner = make_learner(config)
    metrics = [learner.update(random_batch(seed, config.loss)) for seed in range(steps)]
    return learner, metrics


def logits(policy, batch):
    with torch.no_grad():
        return policy(packed_rows(batch, CPU), lambda hidden, weight: hidden @ weight.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_learn(model, dtype):
    config = lora_config(model, model={"dtype": dtype})
    learner = make_learner(config)
    before = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    start = logits(learner.policy, random_batch(9, config.loss))
    plain = Policy.load(model, make_config(model, model={"dtype": dtype}).model, CPU)
    assert torch.equal(start, logits(plain, random_batch(9, config.loss)))  # B starts at zero
    losses = [learner.update(random_batch(0, config.loss))["loss"] for _ in range(5)]
    changed = {name for name, parameter in learner.policy.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == {name for name in before if ".lora_" in name} == {name for name, _ in learner.policy.trainable_parameters()}
    assert len(changed) == 2 * 2 * 7  # A and B of seven linear layers in each of two decoder layers
    assert losses[-1] < losses[0]


def test_the_frozen_head_costs_no_weight_gradient(model, monkeypatch):
    kernel = sys.modules["headrace.kernels.linear_policy_loss"]  # the package's attribute of this name is the function
    wanted = []
    real = kernel._score_and_differentiate
    monkeypatch.setattr(kernel, "_score_and_differentiate", lambda batch, hidden, h, w: wanted.append((h, w)) or real(batch, hidden, h, w))
    trained(lora_config(model), steps=1)
    assert set(wanted) == {(True, False)}


def test_the_base_is_the_reference(model):
    """No second copy: with its adapters off the policy is what it was; the divergence is against that."""
    config = lora_config(model, loss={"kl_coef": 0.1})
    learner = make_learner(config)
    assert sum(1 for value in vars(learner).values() if isinstance(value, Policy)) == 1
    batch = random_batch(1, config.loss)
    start = logits(learner.policy, batch)
    for seed in range(3):
        learner.update(random_batch(seed, config.loss))
    with without_adapters(learner.policy):
        assert torch.equal(logits(learner.policy, batch), start)
    assert not torch.equal(logits(learner.policy, batch), start)
    ours, theirs = (score_batch(policy, batch, BANNED, 60, CPU) for policy in (learner.policy, learner.reference))
    gap = (theirs.logprobs - ours.logprobs)[batch.response_mask].astype(np.float64)
    assert learner.update(batch)["policy/reference_kl"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-4)


def test_its_gradients_are_those_of_a_merged_layer(model):
    """dB = scale dW Aᵀ: with B moved, the gradient of B follows from that of the merged weight."""
    config = lora_config(model, optimizer={"clip_norm": 1e9})
    learner = moved(make_learner(config))
    whole = make_learner(make_config(model, optimizer={"clip_norm": 1e9}))
    with torch.no_grad():
        merged = {f"model.{name}": tensor.clone() for name, tensor in named_weights(learner.policy.model)}
        for name, parameter in whole.policy.named_parameters():
            parameter.copy_(merged[name])
    batch = random_batch(2, config.loss)
    for one in (learner, whole):
        one.update(batch)
    full = {name: entry["exp_avg"] for name, entry in whole.optimizer.state_dict().items()}
    small = {name: entry["exp_avg"] for name, entry in learner.optimizer.state_dict().items()}
    start = moved(make_learner(config))
    for name, layer in adapted_layers(start.policy):
        expected = layer.scaling["default"] * full[f"{name}.weight"] @ layer.lora_A["default"].weight.T
        torch.testing.assert_close(small[f"{name}.lora_B.default.weight"], expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("family", ["text", "vision"])
def test_an_export_is_merged_and_named_as_before(tmp_path, family):
    """transformers finds no adapter: the same names as in the starting directory, and the learner's own logits."""
    directory = tiny_model(tmp_path / "model") if family == "text" else tiny_vision_model(tmp_path / "model")
    learner = moved(make_learner(lora_config(directory)))
    encoder = Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=99)
    target = checkpoint.export(learner.policy, encoder, tmp_path / "out")
    before, after = load_file(directory / "model.safetensors"), load_file(target / "model.safetensors")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: tensor.shape for name, tensor in after.items()}
    if family == "text":
        batch = random_batch(3, learner.config.loss, groups=1, size=1)
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(target)(torch.from_numpy(batch.token_ids)[None]).logits[0]
        torch.testing.assert_close(logits(learner.policy, batch), theirs, rtol=1e-4, atol=1e-5)
    else:
        AutoModelForImageTextToText.from_pretrained(target)
        batch = picture_batch(directory, 0, learner.config.loss)
        reloaded = Policy.load(target, make_config(target).model, CPU)
        torch.testing.assert_close(logits(learner.policy, batch), logits(reloaded, batch), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_holds_adapters_and_resumes_to_the_bit(model, tmp_path):
    config = lora_config(model, loss={"kl_coef": 0.05})
    whole, _ = trained(config, steps=4)
    first, _ = trained(config, steps=2)
    path = checkpoint.save(tmp_path, 2, first, {})
    assert all(".lora_" in name for name in checkpoint.read_state(path)["parameters"])
    second = make_learner(config)
    checkpoint.restore(tmp_path, second)
    for seed in (2, 3):
        second.update(random_batch(seed, config.loss))
    assert all(map(torch.equal, whole.policy.parameters(), second.policy.parameters()))
    with pytest.raises(checkpoint.CheckpointError, match="belongs to another model"):
        checkpoint.restore(tmp_path, make_learner(make_config(model)))


def test_names_and_shapes_need_no_merging(model):
    policy = moved(make_learner(lora_config(model))).policy
    merged, plain = (dict(named_weights(policy.model, merge=merge)) for merge in (True, False))
    assert {name: tensor.shape for name, tensor in merged.items()} == {name: tensor.shape for name, tensor in plain.items()}
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])


def test_some_layers_only(model):
    policy = make_learner(lora_config(model, model={"lora": {**LORA, "layers": ["q_proj", "v_proj"]}})).policy
    assert {name.rpartition(".")[2] for name, _ in adapted_layers(policy)} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"model.lora.layers: the decoder has no linear layer query; it has down_proj, .*v_proj$"):
        Policy.load(model, ModelConfig(source=DirectoryModel(path=model), lora=LoRAConfig(layers=("query", "v_proj"))), CPU)


def test_settings_that_do_not_go_together(model, monkeypatch):
    with pytest.raises(ValueError, match="train_vision cannot be set with it"):
        ModelConfig(source=DirectoryModel(path=Path("x")), lora=LoRAConfig(), train_vision=True)
    real = builtins.__import__

    def without_peft(name, *args, **options):
        if name == "peft":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ConfigError, match=r"^model.lora needs the package peft: pip install 'headrace\[lora\]'$"):
        add_adapters(torch.nn.Linear(1, 1), LoRAConfig())
