"""The last line of a run of pytest: what it left out."""

from support.rigs.not_run import not_run


def test_everything_that_ran_needs_no_line() -> None:
    assert not_run("", []) == ""
    assert not_run("long or slow", []) == ""


def test_deselected_tests_are_named_with_their_targets() -> None:
    assert not_run("not long and not slow and not gpu", []) == (
        "not run: long tests (make test-all), slow ones (make test-slow), "
        "those on GPUs (pytest -m gpu)"
    )


def test_skipped_tests_are_counted_by_the_target_that_runs_them() -> None:
    causes = [
        "no promtool here: make test-tools has it",
        "PEFT is not installed here: make test-peft has it",
        "no verifiers here: make test-tools has it",
        "namespaces need root",
    ]
    assert not_run("not slow", causes) == (
        "not run: slow ones (make test-slow), 1 skipped (make test-peft), "
        "2 skipped (make test-tools), 1 skipped for the causes above"
    )
