"""Embed the engine with a reward of your own: ``python examples/own_reward.py``; a minute or two on two CPU cores."""

from pathlib import Path

import headrace
from headrace.records import Question


def brevity(question: Question, text: str) -> float:
    """1 for a closed answer within 40 words; `text` is the whole response, a pre-filled think tag included."""
    return float(text.endswith("</answer>") and len(text.split()) <= 40)


def main() -> None:
    """Take the demo's policy and questions, and ten steps of another reward."""
    demo = Path(__file__).parents[1] / "configs" / "demo.yaml"
    overrides = ["run.name=own_reward", "run.steps=10", "questions.held_out=null"]
    config = headrace.load_config(demo, overrides)
    result = headrace.Trainer(config, reward=brevity).train()
    print(f"{result.step} steps; the report is {result.report}")


if __name__ == "__main__":
    main()
