"""Parts of models that see images."""

import torch
from slipstream.learner.trainer.layers.vision_tower import Tower, frequency_axes


def test_tables_of_angles_stay_float32_in_bfloat16() -> None:
    inner = torch.nn.Linear(2, 2)
    inner.register_buffer("angles", torch.tensor([1.0, 1 / 3]), persistent=False)
    tower = Tower(inner).bfloat16()
    assert inner.weight.dtype == torch.bfloat16
    assert inner.angles.tolist() == torch.tensor([1.0, 1 / 3]).tolist()
    assert [name for name, _ in tower.named_parameters()] == [
        "inner.weight",
        "inner.bias",
    ]


def test_frequencies_turn_by_time_height_and_width_in_sections_or_in_turns() -> None:
    axes = frequency_axes([2, 3, 3], False)
    assert axes.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    # Interleaved ones alternate as long as an axis has some left; the rest is time.
    axes = frequency_axes([4, 2, 2], True)
    assert axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
