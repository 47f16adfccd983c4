from deploy.environments.word_problems import WordProblems


def test_the_last_number_of_a_reply_is_the_answer() -> None:
    environment = WordProblems()
    tasks = environment.tasks()
    assert tasks == WordProblems().tasks()
    for task in tasks:
        (message,) = environment.reset(task)
        assert int(environment.answer) > 0
        assert all(str(part) in message["content"] for part in task)
    right = environment.answer
    assert environment.step(f"12 and 3, so {right} are left.").reward == 1.0
    for wrong in ("", "I do not know.", f"{right}, or 999", f"{right}0"):
        assert environment.step(wrong).reward == 0.0
