"""What vLLM does with drafts on CPUs, and what is mended."""

import random
from types import SimpleNamespace

import numpy as np
import torch
from slipstream.rollout_server.vllm.cpu_repairs import SharedTextProposer, repair_expansion
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def expanded(values: list[float], ends: list[int]) -> list[float]:
    current_platform.register_triton_kernel_overrides()
    found = rejection_sampler.expand_batch_to_tokens(
        torch.tensor(values), torch.tensor(ends), ends[-1], replace_from=0, replace_to=1
    )
    return found.tolist()


def test_each_drafted_token_gets_the_temperature_of_its_request() -> None:
    repair_expansion()
    # The second request has no draft; the third one is greedy.
    assert expanded([0.5, 0.7, 0.0, 2.0], [2, 2, 3, 6]) == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_row_of_vllms_table_is_drafted_from_all_of_them() -> None:
    settings = SimpleNamespace(
        num_speculative_tokens=3, model_config=SimpleNamespace(max_model_len=50)
    )
    proposer = SharedTextProposer(settings)
    text = random.Random(1).sample(range(1000, 9000), 60)
    tokens, ends = np.zeros((2, 64), dtype=np.int32), np.zeros(2, dtype=np.int32)

    def step(*new: list[int], sampled: list[list[int]]) -> list[list[int]]:
        for row, found in enumerate(new):
            tokens[row, ends[row] : ends[row] + len(found)] = found
            ends[row] += len(found)
        return proposer.propose(sampled, ends, tokens)

    # A prompt that is not computed to its end has no draft, and is not entered yet.
    assert step(text[:20], [7], sampled=[[], []]) == [[], []]
    assert step([], [text[4]], sampled=[[], [text[4]]]) == [[], [text[4]] * 3]
    assert step([text[20]], [], sampled=[[text[20]], []])[0] == [text[20]] * 3
    assert step([], [text[9]], sampled=[[], [text[9]]]) == [[], text[10:13]]
    # What is sampled is entered once a whole draft stands behind it.
    new = text[21:25]
    assert step(new, [text[20]], sampled=[new, [text[20]]])[1] == text[21:24]
    # Another request has the row: its prompt is entered.
    ends[0] = 0
    tokens[0] = 0
    step([5, *text[40:48]], [], sampled=[[text[47]], []])
    assert step([], [text[41]], sampled=[[], [text[41]]])[1] == text[42:45]
    # The longest text that the model takes has no draft.
    ends[1] = 49
    assert step([], [text[41]], sampled=[[], [text[41]]]) == [[], []]
