"""Drawing on vLLM servers: the processor that runs inside them, their supervisor, their client (docs/vllm.md)."""
