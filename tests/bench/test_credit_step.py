"""The bench of a step with credit rules runs, judges its claims and tells compute and waiting apart."""

import re

from headrace.bench.credit_step import compare_credit


def test_a_step_with_and_without_pacg(capsys) -> None:
    compare_credit("all", prompts=2, rollouts=4, tokens=12, router=0.5, repeats=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 rows x 12 tokens")
    names = ["parent", "pacg, synchronous", "pacg, pipelined", "vppo", "vppo + pacg, pipelined"]
    assert [line[:24].strip() for line in lines[1:]] == names
    waits = {name: float(re.search(r"waits ([\d.]+)", line)[1]) for name, line in zip(names, lines[1:], strict=True)}
    assert waits["parent"] == waits["vppo"] == 0
    assert waits["pacg, synchronous"] > 0.1
