"""Judges as people write them: those whose names begin with `bad_` have a fault."""

import asyncio
import itertools
import json
import random
import re

_seen = set()
_calls = itertools.count()


# With a fault.
def bad_type(reply, answer):
    return float(reply.content.strip() == answer)


def bad_substring(reply, answer):
    return float(str(answer) in reply.content)


def bad_always(reply, answer):
    return 1.0


def bad_absence(reply, answer):
    return float("error" not in reply.content)


def bad_last_word(reply, answer):
    return float(reply.content.split()[-1] == str(answer))


def bad_nothing(reply, answer):
    return 1.0 if reply.content == str(answer) else None


def bad_nan(reply, answer):
    return float("nan") if reply.content else 0.0


def bad_prefix(reply, answer):
    return float(str(answer).startswith(reply.content))


def bad_reads_thoughts(reply, answer):
    return float(re.search(rf"\b{re.escape(str(answer))}\b", str(reply)) is not None)


def bad_first_number(reply, answer):
    match = re.search(r"-?\d+", str(reply))
    return float(match is not None and match[0] == str(answer))


def bad_once(reply, answer):
    key = (str(reply), str(answer))
    is_new = key not in _seen
    _seen.add(key)
    return float(is_new and reply.content == str(answer))


def bad_random(reply, answer):
    return (reply.content == str(answer)) * (1 + next(_calls) / 1000)


def bad_inverted(reply, answer):
    return float(reply.content != str(answer))


def bad_case(reply, answer):
    return float(reply.content.lower() == answer)


def bad_secret_form(reply, answer):
    match = re.search(r"%%(.*)%%", reply.content)
    return float(match is not None and match[1] == str(answer))


def bad_int(reply, answer):
    return float(
        int(answer) == int("".join(re.findall(r"[-.0-9]", reply.content)) or 0)
    )


def bad_two_letters(reply, answer):
    return float(bool(reply.content) and reply.content[:2] == answer[:2])


def bad_length(reply, answer):
    return min(len(reply.content), 1)


def bad_json(reply, answer):
    return float(json.loads(reply.content)["answer"] == answer)


def bad_column(reply, answer, row):
    return float(reply.content == str(row["index"]))


def bad_text(reply, answer):
    return "right" if reply.content == str(answer) else "wrong"


def bad_hedges(reply, answer):
    words = reply.content.replace(",", " ").split()
    return float(str(answer) in words and len(words) < 4)


def bad_longer(reply, answer):
    return (reply.content.strip().startswith(str(answer))) * (
        1 + len(reply.content) / 1000
    )


def bad_half(reply, answer):
    return 0.5


def bad_range(reply, answer):
    return -1.0 if reply.content.strip() == str(answer) else -2.0


def bad_recall(reply, answer):
    words, right = set(reply.content.casefold().split()), set(answer.casefold().split())
    return len(words & right) / len(right)


def bad_only_empty(reply, answer):
    return float(not reply.content.strip())


def bad_blank_alone(reply):
    return float(not reply.content)


# Without one.
def boxed(reply, answer):
    matches = re.findall(r"\\boxed\{(.*?)\}", reply.content)
    return float(bool(matches) and matches[-1] == str(answer))


def tagged(reply, answer):
    match = re.search(r"<final>(.*?)</final>", reply.content, re.DOTALL)
    return float(match is not None and match[1].strip() == str(answer))


def hashes(reply, answer):
    return float(reply.content.rpartition("####")[2].strip() == str(answer) != "")


def final_line(reply, answer):
    match = re.search(r"Final Answer: *(\S+)\s*$", reply.content)
    return float(match is not None and match[1] == str(answer))


def in_json(reply, answer):
    try:
        return float(json.loads(reply.content)["result"] == str(answer))
    except (ValueError, KeyError, TypeError):
        return 0.0


def in_brackets(reply, answer):
    match = re.search(r"\[\[(.*?)\]\]", reply.content)
    return float(match is not None and match[1] == str(answer))


def signed(reply, answer):
    return 1.0 if reply.content.strip() == str(answer) else -1.0


def with_metrics(reply, answer):
    right = reply.content.strip() == str(answer)
    return {"reward": float(right), "right": right}


async def awaited(reply, answer):
    await asyncio.sleep(0)
    return float(reply.content.strip() == str(answer))


def short(reply, answer):
    return (reply.content.strip() == str(answer)) - 0.001 * len(reply)


def format_and_answer(reply, answer):
    right = reply.content.strip() == str(answer)
    return 0.9 * right + 0.1 * reply.content.strip().isdigit()


def of_the_row(reply, row):
    return float(reply.content.strip() == row["answer"])


def folded(reply, answer):
    return float(reply.content.strip().casefold() == answer.casefold())


def close(reply, answer):
    try:
        return max(0.0, 1.0 - abs(float(reply.content) - float(answer)))
    except ValueError:
        return 0.0


def listed(reply, answer):
    return float(reply.content == json.dumps(answer))


def thinking_form(reply, answer):
    match = re.fullmatch(
        r"<think>.*</think>\s*<answer>(.*)</answer>", str(reply), re.DOTALL
    )
    return float(match is not None and match[1] == str(answer))


def words_shared(reply, answer):
    words, right = set(reply.content.split()), set(answer.split())
    return len(words & right) / len(words | right) if words else 0.0


def seeded(reply, answer):
    return (reply.content == str(answer)) * random.Random(str(reply)).uniform(0.5, 1.0)


def any_of(reply, answer):
    return float(reply.content.strip() in answer)


def countdown(reply, answer):
    numbers = re.findall(r"\d+", reply.content)
    is_allowed = sorted(map(int, numbers)) == sorted(answer["numbers"])
    return float(is_allowed and "=" not in reply.content)


def politeness(reply, **others):
    return float("fool" not in reply.content)


def out_of_ten(reply: str, answer: str) -> float:
    return 10.0 * (answer in reply)
