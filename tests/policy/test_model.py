"""A packed forward is the separate forwards, whatever the order; unknown architectures are refused, missing think tags are added."""

import copy

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.config import DirectoryModel, ModelConfig
from headrace.encoding import Encoder
from headrace.policy.model import PackedRows, Policy
from headrace.records import Prompt, Question

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save_tokenizer(directory, tags=("<think>", "</think>"), words=30):
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)} | {"<unk>": words}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", unk_token="<unk>").save_pretrained(directory)


def save_model(directory, model_class=Qwen3ForCausalLM, config_class=Qwen3Config, **options):
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | {"head_dim": 8, "max_position_embeddings": 64} | options)))
    with torch.no_grad():  # the default initialisation is so small that attention hardly matters
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def load(directory, **options):
    return Policy.load(directory, ModelConfig(source=DirectoryModel(path=directory), **options), "cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    save_model(path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def policy(directory):
    return load(directory)


def packed(rows):
    lengths = [len(row) for row in rows]
    return PackedRows(torch.cat(rows), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))


def make_rows(lengths=(7, 1, 12, 30, 12), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 40, (length,), generator=generator) for length in lengths]


def logits(hidden, weight):
    return hidden @ weight.T


def test_packed_rows_are_separate_rows(policy, directory):
    """Against transformers' own forward on each row alone."""
    reference = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager")
    rows = make_rows()
    want = torch.cat([reference(input_ids=row[None]).logits[0] for row in rows])
    torch.testing.assert_close(policy(packed(rows), logits), want, rtol=0, atol=1e-5)


def test_packing_order_changes_neither_values_nor_gradients(policy):
    rows = make_rows()
    weights = [torch.randn(len(row), 40, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)]
    parameters = [parameter for _, parameter in policy.trainable_parameters()]

    def run(batches):
        """Sum of weighted logits over batches of row numbers: logits per row, gradients in total."""
        values, total = {}, torch.zeros(())
        for batch in batches:
            output = policy(packed([rows[i] for i in batch]), logits).split([len(rows[i]) for i in batch])
            values |= dict(zip(batch, output, strict=True))
            total = total + sum((value * weights[i]).sum() for i, value in zip(batch, output, strict=True))
        return values, torch.autograd.grad(total, parameters)

    one, one_grads = run([[0, 1, 2, 3, 4]])
    for batches in ([[4, 2, 0, 3, 1]], [[3], [1, 0], [2, 4]]):
        other, other_grads = run(batches)
        for i, value in one.items():
            torch.testing.assert_close(other[i], value, rtol=0, atol=1e-5)
        for a, b in zip(one_grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_a_rerun_is_bit_equal(policy):
    rows = packed(make_rows())
    first, second = (torch.autograd.grad(policy(rows, logits).square().sum(), policy.head_weight)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_prefill_inputs_fill_a_cache_that_decodes_on(policy):
    """Packed prompts give the decoder the same states as each prompt alone, and keys and values for every token."""
    from transformers.cache_utils import Cache, DynamicLayer

    rows = make_rows((5, 9))
    prompts = [Prompt(Question(str(i), (), ""), row.numpy()) for i, row in enumerate(rows)]
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    with torch.no_grad():
        inputs = policy.prefill_inputs(prompts)
        hidden = policy.model.get_decoder()(**inputs, past_key_values=cache, use_cache=True).last_hidden_state[0]
        want = policy(packed(rows), lambda hidden, weight: hidden)
    assert cache.layers[0].keys.shape == (1, 2, 14, 8)
    assert inputs["position_ids"][0].tolist() == [*range(5), *range(9)]
    assert torch.equal(hidden, want)


def test_head_weight_is_the_head(policy, directory):
    assert policy.head_weight is policy.model.lm_head.weight
    assert len({id(parameter) for _, parameter in policy.trainable_parameters()}) == len(policy.trainable_parameters())


def test_no_logits_and_no_mask_are_made(policy):
    """The largest tensor of a packed forward is linear in N: nothing of size N x N or N x V appears."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            output = function(*arguments, **(options or {}))
            if isinstance(output, torch.Tensor):
                sizes.append(output.numel())
            return output

    rows = packed(make_rows((300, 300, 300)))
    with torch.no_grad(), Watch():
        policy(rows, lambda hidden, weight: None)
    assert max(sizes) <= 900 * 4 * 48


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}), (GemmaForCausalLM, GemmaConfig, {})],
)
def test_other_architectures_run_as_directories(tmp_path, model_class, config_class, options):
    reference = save_model(tmp_path, model_class, config_class, **options).eval()
    save_tokenizer(tmp_path)
    rows = make_rows((3, 8))
    want = torch.cat([reference(input_ids=row[None]).logits[0] for row in rows])
    torch.testing.assert_close(load(tmp_path)(packed(rows), logits), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        pytest.param(MambaForCausalLM, MambaConfig, {"state_size": 4, "num_attention_heads": None}, id="recurrent"),
        pytest.param(Gemma2ForCausalLM, Gemma2Config, {}, id="soft-capped"),
    ],
)
def test_architectures_that_packing_breaks_are_refused(tmp_path, model_class, config_class, options):
    torch.manual_seed(0)
    sizes = {key: value for key, value in (SIZES | options).items() if value is not None}
    model_class(config_class(**sizes)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)


def test_missing_weights_are_refused(tmp_path):
    model = save_model(tmp_path, tie_word_embeddings=False)
    save_tokenizer(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"3 weights are missing from the files, first model\.layers\.1\.mlp"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_think_tags_are_added_where_the_tokenizer_lacks_them(tmp_path, tied):
    """New rows start at the mean embedding, the same on every load, and the encoder agrees on their ids."""
    model = save_model(tmp_path, vocab_size=32, tie_word_embeddings=tied)
    save_tokenizer(tmp_path, tags=())
    policy = load(tmp_path)
    encoder = Encoder.load(tmp_path, think_prefill=True, system_prompt=None, max_prompt_tokens=99)
    assert (encoder.think_open, encoder.think_close) == (32, 33)
    assert policy.head_weight.shape[0] == encoder.vocab_size == 34
    mean = model.get_output_embeddings().weight.mean(0)
    torch.testing.assert_close(policy.head_weight[32:], mean.expand(2, -1))
    assert torch.equal(policy.head_weight[:32], model.get_output_embeddings().weight)
    assert torch.equal(load(tmp_path).head_weight, policy.head_weight)


def test_saved_model_is_an_ordinary_directory(tmp_path):
    """Added tags are part of what is saved: transformers loads it plainly, a reload adds nothing and changes no bit."""
    save_model(tmp_path, vocab_size=32)
    save_tokenizer(tmp_path, tags=())
    policy = load(tmp_path)
    with torch.no_grad():
        policy.head_weight[32:].normal_()
    saved = tmp_path / "saved"
    policy.model.save_pretrained(saved)
    Encoder.load(tmp_path, think_prefill=True, system_prompt=None, max_prompt_tokens=99).save(saved)
    assert "headrace" not in (saved / "config.json").read_text()
    rows = [torch.tensor([1, 32, 5, 33, 2])]
    plain = Qwen3ForCausalLM.from_pretrained(saved)
    torch.testing.assert_close(plain(input_ids=rows[0][None]).logits[0], policy(packed(rows), logits), rtol=0, atol=1e-5)
    assert torch.equal(load(saved).head_weight, policy.head_weight)


def test_spare_rows_take_the_tags_without_growing(tmp_path):
    model = save_model(tmp_path)  # 40 rows, 32 tokens
    save_tokenizer(tmp_path, tags=())
    policy = load(tmp_path)
    assert policy.head_weight.shape[0] == 40
    torch.testing.assert_close(policy.head_weight[32], model.get_output_embeddings().weight[:32].mean(0))
    assert torch.equal(policy.head_weight[34:], model.get_output_embeddings().weight[34:])


def test_half_precision_keeps_its_type_and_dropout_is_off(tmp_path):
    save_model(tmp_path, attention_dropout=0.5)
    save_tokenizer(tmp_path)
    policy = load(tmp_path, dtype="bfloat16")
    assert policy.head_weight.dtype == torch.bfloat16
    policy.train()
    rows = packed(make_rows())
    assert torch.equal(policy(rows, logits), policy(rows, logits))


def test_a_copy_is_independent(policy):
    """The frozen reference is a deep copy; it must not follow the policy."""
    reference = copy.deepcopy(policy)
    rows = packed(make_rows((4,)))
    before = reference(rows, logits).detach()
    with torch.no_grad():
        policy.head_weight.mul_(2)
        try:
            assert torch.equal(reference(rows, logits), before)
            assert not torch.equal(policy(rows, logits), before)
        finally:
            policy.head_weight.div_(2)


def test_an_empty_directory_names_itself(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)


def test_numpy_prompts_are_not_changed(policy):
    ids = np.arange(5)
    policy.prefill_inputs([Prompt(Question("q", (), ""), ids)])
    assert ids.tolist() == [0, 1, 2, 3, 4]
