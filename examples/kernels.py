"""The kernels without the engine: ``python examples/kernels.py``."""

import torch

from headrace.kernels import PolicySpec, linear_policy_loss, top_token_sample


def main() -> None:
    """Draw under the top-token mask, then take the gated clipped loss of the draws with its gradients."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 64, 32, 1000
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)

    with torch.no_grad():
        logits = hidden @ weight.T
        drawn = top_token_sample(
            logits,
            eligible=torch.ones(tokens, dtype=torch.bool),
            threshold=0.95,
            seeds=torch.full((tokens,), 7),
            positions=torch.arange(tokens),
        )
    print(f"the mask removed the top token at {int(drawn.fired.sum())} of {tokens} positions")

    result = linear_policy_loss(
        hidden,
        weight,
        targets=drawn.token,
        old_logprobs=drawn.logprob,
        advantages=torch.randn(tokens),
        weights=torch.full((tokens,), 1 / tokens),
        spec=PolicySpec(clip_low=0.2, clip_high=0.3),
        mask=~drawn.fired,
    )
    result.loss.backward()
    print(f"loss {result.loss.item():.4f}, |dW| {weight.grad.norm():.4f}, mean entropy {result.entropies.mean():.2f} nats")


if __name__ == "__main__":
    main()
