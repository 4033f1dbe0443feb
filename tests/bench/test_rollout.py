"""The bench of sampling runs from its command and reports both of our ratios."""

import re

from headrace.bench.rollout import rollout


def test_both_ratios_are_over_generate(capsys) -> None:
    rollout(prompts=2, rollouts=2, prompt_tokens=6, tokens=4, repeats=1)
    printed = capsys.readouterr().out
    baseline = float(re.search(r"4 rows x 4 tokens, .* generate ([\d.]+) s", printed).group(1))
    for kind in ("free", "masked"):
        ours, ratio = map(float, re.search(rf"{kind} +([\d.]+) s = ([\d.]+) x generate", printed).groups())
        assert abs(ours / baseline - ratio) < 0.1 * ratio + 0.01
