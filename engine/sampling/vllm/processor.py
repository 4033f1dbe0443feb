"""The top-token mask as a vLLM logits processor. Only vLLM's own processes import this module.

One class serves both runner interfaces: the first constructs it with (config, device, pinned), the second with (config, request states).
"""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import Tensor
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as BatchProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotProcessor

from headrace.sampling.vllm.channel import KEY, SPARE_ROWS, RequestArguments, first_error

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext


class TopTokenProcessor(BatchProcessor, SlotProcessor):
    """Removes banned ids for every request, and for those that ask the nearly certain top token; reports in-band (`channel`)."""

    _runner: Any

    def __init__(self, vllm_config: "VllmConfig", *arguments: Any) -> None:
        if len(arguments) == 1:
            from headrace.sampling.vllm.runner_v2 import SlotRunner

            self._runner = SlotRunner(vllm_config, arguments[0])
        else:
            from headrace.sampling.vllm.runner_v1 import BatchRunner

            self._runner = BatchRunner(vllm_config, arguments[0])

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Refuse a request whose drawn distribution or report would not be what it says.

        Raises:
            ValueError: one line; the server answers HTTP 400.
        """
        given = (sampling_params.extra_args or {}).get(KEY)
        if given is None:
            if sampling_params.top_p < 1:
                raise ValueError(f"top_p: on this server it would cut what others report; give it as extra_args.{KEY}.top_p")
            return
        try:
            RequestArguments.model_validate(given)
        except ValidationError as error:
            raise ValueError(f"extra_args.{KEY}: {first_error(error)}") from None
        refused = [name for name, present in _meddling(sampling_params).items() if present]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not together with extra_args.{KEY}, which takes top_p and top_k itself")
        if len(set(sampling_params.logprob_token_ids or ())) != SPARE_ROWS:  # over HTTP one comes twice: the route lists one too few
            raise ValueError(f"logprob_token_ids must name the {SPARE_ROWS} spare rows that extra_args.{KEY} reports through")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        self._runner.update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        added: bool = self._runner.add_request(req_idx, sampling_params)
        return added

    def apply_staged_writes(self) -> None:
        self._runner.apply_staged_writes()

    def apply(self, logits: Tensor, ctx: "LogitsContext | None" = None) -> Tensor:
        result: Tensor = self._runner.apply(logits) if ctx is None else self._runner.apply(logits, ctx)
        return result


def _meddling(params: "SamplingParams") -> dict[str, bool]:
    """Settings that change the distribution beside the mask, and whether a request has them."""
    return {
        "top_p": params.top_p < 1,
        "top_k": params.top_k > 0,
        "min_p": params.min_p > 0,
        "min_tokens": params.min_tokens > 0,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "logit_bias": bool(params.logit_bias),
        "bad_words": bool(params.bad_words),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "structured_outputs": params.structured_outputs is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "watermarking": bool(params.watermarking),
    }
