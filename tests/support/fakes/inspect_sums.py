"""A task of Inspect as its documents show one; read by Inspect in its own Python."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact, match
from inspect_ai.solver import generate, system_message


@task
def sums(most: int = 4):
    samples = [Sample(input=f"What is {n} + {n}?", target=str(2 * n)) for n in range(most)]
    return Task(dataset=samples, solver=generate(), scorer=match())


@task
def two_scorers():
    solver = [system_message("Reply with the number alone."), generate()]
    return Task(
        dataset=[Sample(input="What is 2 + 2?", target="4")],
        solver=solver,
        scorer=[match(), exact()],
    )
