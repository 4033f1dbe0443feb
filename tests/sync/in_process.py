"""A vLLM engine inside the test's process behind the same control methods as a server over HTTP; and tiny models for it."""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR"
)

from pathlib import Path

import headrace  # noqa: F401  lets torchvision import beside CPU torch

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from headrace.sync.weight_sync import WORKER_EXTENSION


class InProcess:
    """``headrace.sync.servers.Server`` over an ``LLM`` of this process."""

    name = "in-process"

    def __init__(self, model: Path, dtype: str = "float32", **arguments):
        self.generation = 0
        self.llm = LLM(
            str(model),
            dtype=dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            max_num_seqs=8,
            logprobs_mode="raw_logprobs",
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config={"backend": "shm"},
            **arguments,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core

    def pause(self, mode):
        self.engine.renderer.clear_mm_cache()
        self.core.pause_scheduler(mode, True)

    def resume(self):
        self.core.resume_scheduler()

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, update_info):
        self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)

    def call_workers(self, method):
        return self.llm.collective_rpc(method)

    def world_size(self):
        return 1

    def score(self, token_ids):
        return self.scores(list(token_ids))

    def scores(self, token_ids, from_=1):
        output = self.llm.generate(
            {"prompt_token_ids": token_ids}, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False
        )[0]
        return [output.prompt_logprobs[at][token_ids[at]].logprob for at in range(from_, len(token_ids))]

    def greedy(self, prompts, tokens):
        """Per prompt the new token ids and their log-probs."""
        outputs = self.llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True), use_tqdm=False)
        return [
            (list(o.outputs[0].token_ids), [step[t].logprob for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)])
            for o in outputs
        ]


def qwen3(directory: Path, *, tied: bool, seed: int = 0, vocab: int = 300) -> Path:
    """A tiny Qwen3 whose vocabulary is no multiple of the padding of vLLM's."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
