"""Label checks that cost a GPU no synchronisation."""

import torch
from torch import Tensor

_bad: dict[torch.device, Tensor] = {}
"""One flag per device, set by any call that met a bad label."""


def check_labels(targets: Tensor, vocabulary: int, ignore_index: int, banned: Tensor | None) -> None:
    """Raise where a label is neither `ignore_index` nor a token that may be drawn; on a GPU only note it."""
    bad = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if banned is not None:
        bad |= torch.isin(targets, banned) & (targets != ignore_index)
    if targets.device.type == "cpu":
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"targets[{row}] = {int(targets[row])} is neither a label in [0, {vocabulary}) that is not banned "
                f"nor ignore_index ({ignore_index})"
            )
        return
    note(bad.any())


def check_found(target_logits: Tensor) -> None:
    """The same for a vocabulary spread over ranks: a label no rank owns has no logit."""
    bad = torch.isneginf(target_logits)
    if target_logits.device.type == "cpu":
        if bad.any():
            raise ValueError(f"{int(bad.sum())} targets are no label of any rank's part of the vocabulary, or banned")
        return
    note(bad.any())


def note(bad: Tensor) -> None:
    """Set the flag of a device, without a host sync."""
    flag = _bad.get(bad.device)
    _bad[bad.device] = bad.clone() if flag is None else flag.logical_or_(bad)


def raise_on_bad_labels() -> None:
    """Raise if a kernel met a bad label on a GPU since the last call. Reads one flag per device: call it once per step."""
    flags, devices = list(_bad.values()), list(_bad)
    _bad.clear()
    if any(bool(flag) for flag in flags):
        names = ", ".join(str(device) for device in devices)
        raise ValueError(f"targets on {names} held a label outside the vocabulary, or a banned one, that is not ignore_index")
