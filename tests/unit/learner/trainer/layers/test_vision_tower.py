"""Parts of models that see images."""

import torch
from slipstream.learner.trainer.batches.training_sequence import ImageInputs
from slipstream.learner.trainer.layers.vision_tower import PixtralTower, Tower, frequency_axes
from transformers import Mistral3Config
from transformers.models.pixtral import modeling_pixtral


def test_tables_of_angles_stay_float32_in_bfloat16() -> None:
    inner = torch.nn.Linear(2, 2)
    inner.register_buffer("angles", torch.tensor([1.0, 1 / 3]), persistent=False)
    tower = Tower(inner).bfloat16()
    assert inner.weight.dtype == torch.bfloat16
    assert inner.angles.tolist() == torch.tensor([1.0, 1 / 3]).tolist()
    assert [name for name, _ in tower.named_parameters()] == ["inner.weight", "inner.bias"]


def test_each_image_of_pixtral_is_computed_alone_without_a_mask(monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    settings = Mistral3Config(
        text_config={"model_type": "mistral", "num_hidden_layers": 1, **sizes},
        vision_config={"num_hidden_layers": 2, "image_size": 112, "patch_size": 14, **sizes},
    )
    tower = PixtralTower(settings)
    grids = [(4, 6), (2, 2), (8, 4)]
    patches = [torch.randn(height * width, 3, 14, 14) for height, width in grids]
    # transformers' own forward takes images in one tensor, with room below and beside them.
    pixels = torch.zeros(len(grids), 3, 112, 112)
    for image, each, (height, width) in zip(pixels, patches, grids, strict=True):
        rows = each.view(height, width, 3, 14, 14).permute(2, 0, 3, 1, 4)
        image[:, : 14 * height, : 14 * width] = rows.reshape(3, 14 * height, 14 * width)
    sides = [(14 * height, 14 * width) for height, width in grids]
    states = tower.inner.vision_tower(pixels, image_sizes=sides).last_hidden_state[0]
    expected = tower.inner.multi_modal_projector(states, sides)

    # A mask has a number for each pair of patches: 146 million for an image of 1540 pixels a side.
    monkeypatch.delattr(modeling_pixtral, "generate_block_attention_mask")
    nothing = torch.zeros(0, dtype=torch.int64)
    images = ImageInputs(
        nothing,
        nothing,
        torch.cat(patches).flatten(1),
        torch.tensor([(1, *grid) for grid in grids]),
    )
    (found,) = tower(images)
    torch.testing.assert_close(found, expected)


def test_frequencies_turn_by_time_height_and_width_in_sections_or_in_turns() -> None:
    found = frequency_axes([2, 3, 3], False)
    assert found.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    # Interleaved ones alternate as long as an axis has some left; the rest is time.
    found = frequency_axes([4, 2, 2], True)
    assert found.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
