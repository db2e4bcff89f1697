"""Tasks for workers. The module imports no more than a task does, since loading the libraries of a
test's own module may take longer than the limit of a reward."""

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example


class Distance(Task):
    primary_metric = "error"
    lower_is_better = True

    def parse(self, text: str, example: Example) -> float | None:
        return float(text) if text else None

    def write(self, answer: float, example: Example) -> str:
        if answer == 13:
            raise RuntimeError("a user's method")
        return f"{answer:.0f}"

    @reward()
    def near(self, answer: float, example: Example) -> float:
        return 1.0 / (1.0 + abs(answer - example.answer))

    @metric(without_answer=None)
    def error(self, answer: float, example: Example) -> float:
        return abs(answer - example.answer)
