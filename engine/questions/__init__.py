"""Where prompts come from: data set rows, task generators, the ledger."""

from headrace.questions.sets import QuestionSet, TaskSet, load

__all__ = ["QuestionSet", "TaskSet", "load"]
