"""A vLLM engine without a server, in a child process: the control methods of ``headrace.sync.servers.Server`` over a pipe.

The child can also run requests step by step, which no HTTP server does: so a test knows at which token the weights changed.
vLLM leaves a process group and caches in its process; a child keeps them away from other tests.
"""

import gc
import os
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

STARTUP = Path(__file__).parents[2] / "engine/sampling/vllm/startup"  # torchvision beside CPU torch, also in vLLM's own children
ENVIRONMENT = {
    "PYTHONPATH": str(STARTUP),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Engine:
    """In the child: one ``LLM``."""

    def load(self, model, dtype="float32", **arguments):
        from vllm import LLM

        self.llm = self.engine = self.core = None
        gc.collect()  # vLLM takes its process group down when the old engine goes
        self.llm = LLM(
            str(model),
            dtype=dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            max_num_seqs=8,
            seed=0,
            worker_extension_cls="headrace.sync.worker.Extension",
            weight_transfer_config={"backend": "shm"},
            **arguments,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.finished = {}

    def pause(self, mode):
        self.engine.renderer.clear_mm_cache()
        self.core.pause_scheduler(mode, True)

    def resume(self):
        self.core.resume_scheduler()

    def init_weight_transfer_engine(self, init_info):
        self._update("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self):
        self._update("start_weight_update")

    def update_weights(self, update_info):
        self._update("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version=None):
        self._update("finish_weight_update")
        self.core.set_weight_version(weight_version)

    def _update(self, method, **arguments):
        self.llm.collective_rpc(method, kwargs=arguments)

    def call_workers(self, method):
        return self.llm.collective_rpc(method)

    def world_size(self):
        return 1

    def version(self):
        return self.core.get_weight_version()

    def paused(self):
        return self.core.is_scheduler_paused()

    def score(self, token_ids):
        """Log-probs of the prompt's tokens after the first. Other requests go on beside it, as they do on a server."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        self.engine.add_request("score", {"prompt_token_ids": list(token_ids)}, sampling)
        while "score" not in self.finished:
            self._step()
        scored = self.finished.pop("score").prompt_logprobs
        return [scored[at][token].logprob for at, token in enumerate(token_ids) if at]

    def begin(self, prompts, tokens):
        """Take up greedy requests; a prompt is token ids, or a pair of token ids and a picture."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            ids, picture = prompt if isinstance(prompt, tuple) else (prompt, None)
            given = {"prompt_token_ids": list(ids)} | ({} if picture is None else {"multi_modal_data": {"image": picture}})
            self.engine.add_request(str(index), given, sampling)

    def steps(self, count=None):
        """Run so many steps, or all; of each finished request ids, log-probs, cached prompt tokens and spans of versions."""
        while self.engine.has_unfinished_requests() and count != 0:
            self._step()
            count = None if count is None else count - 1
        done = [self.finished.pop(key) for key in sorted(self.finished, key=int)]
        return [(*_answer(output.outputs[0]), output.num_cached_tokens, _spans(output.outputs[0])) for output in done]

    def _step(self):
        for output in self.engine.step():
            if output.finished:
                self.finished[output.request_id] = output

    def greedy(self, prompts, tokens):
        self.begin(prompts, tokens)
        return self.steps()


def _answer(choice):
    tokens = list(choice.token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, choice.logprobs, strict=True)]


def _spans(choice):
    return [(span.version, span.start, span.end) for span in choice.weight_versions]


class InProcess:
    """In the test: the child's engine, every method a call over the pipe."""

    name = "in-process"

    def __init__(self, folder: Path):
        self.generation = 0
        self._loaded = None
        self._running = threading.Event()
        self._running.set()
        address = str(folder / "engine")
        with Listener(address, "AF_UNIX") as listener, (folder / "engine.log").open("wb") as log:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM")} | ENVIRONMENT
            self._child = subprocess.Popen([sys.executable, __file__, address], env=environment, stdout=log, stderr=log)
            self._pipe = listener.accept()

    def load(self, *arguments):
        """Have this model loaded, as it is on disk or as the last push left it."""
        if arguments != self._loaded:
            self._loaded = None
            self._call("load", *arguments)
            self._loaded = arguments
            self.generation += 1

    def pause(self, mode):
        self._call("pause", mode)
        self._running.clear()

    def resume(self):
        self._call("resume")
        self._running.set()

    def score(self, token_ids):
        """Waits for ``resume`` here, since the child does one thing at a time."""
        self._running.wait(60)
        return self._call("score", token_ids)

    def __getattr__(self, method):
        return lambda *arguments, **keywords: self._call(method, *arguments, **keywords)

    def _call(self, *call, **keywords):
        self._pipe.send((call[0], call[1:], keywords))
        if not self._pipe.poll(120):
            raise TimeoutError(f"{call[0]}: no answer from the engine")
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def close(self):
        self._pipe.close()
        self._child.kill()
        self._child.wait()


def serve(address):
    engine = Engine()
    with Client(address, "AF_UNIX") as pipe:
        while True:
            try:
                method, arguments, keywords = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((getattr(engine, method)(*arguments, **keywords), None))
            except Exception as error:
                traceback.print_exc()
                pipe.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(sys.argv[1])
