"""Which parameters of a vLLM model an unfinished layerwise reload has filled. Imported by vLLM's worker processes alone."""

from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


def is_loading(model: nn.Module) -> bool:
    """Whether a reload was begun and not finished."""
    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def coverage(model: nn.Module) -> tuple[int, list[str]]:
    """Number of parameters that are filled, and names of those that are not.

    A layer that is full has left the reload already. One that is still in it lacks something, or holds what nobody loads:
    attention scales, buffers, the padding of a vocabulary. A head that shares the embedding is full when that is.
    """
    covered: set[int] = set()
    filled, lacking = 0, {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if is_deferred_attention_layer(layer):
            continue
        wanted = {key: parameter for key, parameter in layer.named_parameters(recurse=False) if key not in SKIP_LOAD_TENSORS}
        absent = _lacking(layer, wanted) if info.can_load() else []
        kernel = wanted if info.kernel_tensors is None else info.kernel_tensors[0]  # the parameters as they are outside a reload
        covered.update(id(kernel.get(key)) for key in wanted if key not in absent)
        lacking.update({f"{name}.{key}": id(kernel.get(key)) for key in absent})
        filled += len(wanted) - len(absent)
    missing = [name for name, parameter in lacking.items() if parameter not in covered]
    return filled + len(lacking) - len(missing), missing


def _lacking(layer: nn.Module, wanted: dict[str, nn.Parameter]) -> list[str]:
    """Parameters of a layer in reload that got nothing; where each got something but not all got everything, all of them."""
    info = get_layerwise_info(layer)
    touched = {key for key, _ in info.loaded_weights}
    if not touched.issuperset(wanted):
        return [key for key in wanted if key not in touched]
    if isinstance(layer, VocabParallelEmbedding):
        return []  # comes in one piece; its padding never comes
    return list(wanted) if info.load_numel < sum(map(get_tensor_load_numel, wanted.values())) else []
