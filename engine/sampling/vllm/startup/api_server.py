"""vLLM's API server, run by path.

Its engine core and workers import the main module of their parent again. This one is empty for them, where vLLM's own would bring
all of its HTTP side: two seconds a process.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
