"""A head spread over ranks equals the whole head: values, both gradients, and bad labels (gloo, 2 and 4 processes)."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.kernels import PolicySpec, linear_logprob, linear_policy_loss

SPECS = (
    PolicySpec(kl_coef=0.1, entropy_coef=0.05),
    PolicySpec("gspo", 0.1, 0.1),
)


def inputs():
    torch.manual_seed(3)
    tokens, width, vocabulary = 21, 6, 32
    hidden, weight = torch.randn(tokens, width, dtype=torch.float64), torch.randn(vocabulary, width, dtype=torch.float64)
    targets = torch.randint(0, 28, (tokens,))
    targets[4] = -100
    old = torch.randn(tokens, dtype=torch.float64) - 4
    streams = (old, torch.randn(tokens, dtype=torch.float64), torch.rand(tokens, dtype=torch.float64))
    return hidden, weight, targets, streams, old + torch.randn(tokens, dtype=torch.float64)


def run(hidden, weight, group):
    """Everything that must agree, from leaves of one rank."""
    _, _, targets, streams, reference = inputs()
    banned = [29, 30]
    logprobs, entropies = linear_logprob(hidden, weight, targets, 0.8, banned=banned, chunk=5, group=group)
    (logprobs * streams[1] + entropies * streams[2]).sum().backward()
    found = [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad]
    for spec in SPECS:
        hidden.grad = weight.grad = None
        out = linear_policy_loss(
            hidden,
            weight,
            targets,
            *streams,
            spec,
            ref_logprobs=reference,
            cu_seqlens=torch.tensor([0, 6, 13, 21]),
            banned=banned,
            chunk=8,
            group=group,
        )
        out.loss.backward()
        found += [out.loss.detach(), out.metrics, hidden.grad, weight.grad]
    return found


def rank_main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    hidden, weight, targets, _, _ = inputs()
    whole = run(hidden.clone().requires_grad_(), weight.clone().requires_grad_(), None)
    part = slice(rank * len(weight) // world, (rank + 1) * len(weight) // world)
    ours = run(hidden.clone().requires_grad_(), weight[part].clone().requires_grad_(), dist.group.WORLD)
    for position, (mine, theirs) in enumerate(zip(ours, whole, strict=True)):
        expected = theirs[part] if position % 4 == 3 else theirs
        torch.testing.assert_close(mine, expected, msg=lambda text, position=position: f"output {position}: {text}")

    bounds = [0, *(32 - 5 * (world - each) for each in range(1, world)), 32]
    part_uneven = weight[bounds[rank] : bounds[rank + 1]]
    uneven = linear_logprob(hidden, part_uneven, targets, group=dist.group.WORLD, offset=bounds[rank])
    torch.testing.assert_close(uneven, linear_logprob(hidden, weight, targets))
    targets[2] = 32
    with pytest.raises(ValueError, match="no label"):
        linear_logprob(hidden, weight[part], targets, group=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_with_the_whole_head(world, tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(rank_main, args=(world, port), nprocs=world, start_method="fork")
