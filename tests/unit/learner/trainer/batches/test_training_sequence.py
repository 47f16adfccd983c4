"""Images of sequences and their positions; the numbers are those of arXiv:2409.12191, figure 3."""

import dataclasses

import numpy as np
import pytest
from make_tiny_vision_model import make_model
from slipstream.core.configuration.batch_bytes import RANK_BYTES_PER_TOKEN
from slipstream.core.errors import UntrainableBatch
from slipstream.core.models.images import ImageProcessor, load_processor
from slipstream.core.types import ImagePlace
from slipstream.learner.trainer.batches.batch import check_pixels
from slipstream.learner.trainer.batches.sequence_images import (
    image_positions,
    images_of,
)
from slipstream.learner.trainer.batches.training_sequence import (
    TOKEN_FIELDS,
    TokenEstimates,
    TrainingSequence,
)
from support.fakes.fake_controller import make_batch
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.packed import packed
from support.ranks.thread_ranks import ThreadRanks, run_ranks

from deploy.environments.colours import COLOURS, square_png

RED = square_png(COLOURS["red"], 0, 0)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("vision")
    make_model(folder, "qwen2_5_vl")
    return load_processor(folder)


def test_text_behind_an_image_goes_on_after_its_longer_side() -> None:
    positions = image_positions(11, [(2, 2, 3)])
    assert positions[:2].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert positions[2:8].tolist() == [
        [2, 2, 2],
        [2, 2, 3],
        [2, 2, 4],
        [2, 3, 2],
        [2, 3, 3],
        [2, 3, 4],
    ]
    assert positions[8:].tolist() == [[5, 5, 5], [6, 6, 6], [7, 7, 7]]


def seen(processor: ImageProcessor, *, offset: int = 2):
    """A trajectory of 3 + 4 + 5 tokens, of which 4 are of an image."""
    trajectory = make_trajectory(8, 4)
    tokens = np.arange(12, dtype=np.uint32)
    tokens[3:7] = 40
    return dataclasses.replace(
        trajectory,
        token_ids=tokens,
        images=(RED,),
        image_places=(ImagePlace(offset, 0),),
    )


def test_images_of_a_micro_batch_lie_where_their_tokens_are(
    processor: ImageProcessor,
) -> None:
    estimates = TokenEstimates(np.ones(4, dtype=np.float32))
    plain = make_trajectory(8, 4)
    trajectory = seen(processor, offset=3)
    sequences = TrainingSequence.of_trajectories(
        [plain, trajectory, trajectory], [estimates] * 3, step=0, processor=processor
    )
    batch = packed(sequences, [1, 0, 2], multiple=8)
    rows = np.full(40, -1)
    rows[3:7], rows[27:31] = np.arange(4), np.arange(4, 8)
    assert batch.images.rows.tolist() == rows.tolist()
    assert batch.images.grids.tolist() == [[1, 4, 4]] * 2
    assert batch.images.positions[7:12, 0].tolist() == [5, 6, 7, 8, 9]
    assert batch.images.positions[12:24, 2].tolist() == list(range(12))
    assert packed(sequences, [0]).images is None


@pytest.mark.parametrize("offset", [2, 4, 10])
def test_an_image_at_other_tokens_cannot_be_trained(
    processor: ImageProcessor, offset: int
) -> None:
    trajectory = seen(processor, offset=offset)
    with pytest.raises(UntrainableBatch, match="an image of 4 tokens has others"):
        images_of(trajectory, slice(0, 12), processor)


def test_a_broken_image_cannot_be_trained(processor: ImageProcessor) -> None:
    trajectory = dataclasses.replace(seen(processor, offset=3), images=(b"no image",))
    with pytest.raises(UntrainableBatch, match="cannot be read"):
        images_of(trajectory, slice(0, 12), processor)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_names_the_images_whose_pixels_are_cut(processor, world_size):
    cut = RED[: len(RED) // 2]
    # The image's tokens follow from its header.
    assert len(processor.tokens(40, cut)) == 4
    good = [
        dataclasses.replace(seen(processor, offset=3), group_id=name)
        for name in "abcde"
    ]
    bad = [dataclasses.replace(t, images=(cut,)) for t in (good[1], good[3])]
    facts: dict[int, tuple[str, tuple[str, ...]]] = {}

    def check(ranks: ThreadRanks) -> None:
        check_pixels(good, ranks)
        with pytest.raises(UntrainableBatch) as error:
            check_pixels([good[0], bad[0], good[2], bad[1], good[4]], ranks)
        facts[ranks.rank] = (str(error.value), tuple(error.value.trajectory_ids))

    run_ranks(world_size, check)
    assert sorted(facts) == list(range(world_size))
    assert len(set(facts.values())) == 1
    message, names = facts[0]
    assert names == tuple(trajectory.trajectory_id for trajectory in bad)
    assert message.startswith(f"{names[0]}: an image cannot be read: ")


def test_an_image_that_no_token_shows_is_not_read(processor: ImageProcessor) -> None:
    trajectory = dataclasses.replace(
        seen(processor, offset=3),
        images=(RED, b"no image"),
        image_places=(ImagePlace(3, 0),),
    )
    run_ranks(2, lambda ranks: check_pixels([trajectory], ranks))


def test_a_dry_run_knows_the_bytes_of_a_token_in_a_rank():
    batch = make_batch(0, num_groups=4, group_size=4, vocab_size=9, max_tokens=400)
    sequences = TrainingSequence.of_trajectories(batch.trajectories, step=0)
    columns = [
        getattr(sequence, name) for sequence in sequences for name in TOKEN_FIELDS
    ]
    num_bytes = sum(column.nbytes for column in columns if column is not None)
    for trajectory in batch.trajectories:
        num_bytes += trajectory.token_ids.nbytes + trajectory.behavior_logprobs.nbytes
    num_tokens = sum(len(sequence) for sequence in sequences)
    # Arrays alone are less than what was resident, and most of it.
    assert 0.7 * RANK_BYTES_PER_TOKEN <= num_bytes / num_tokens <= RANK_BYTES_PER_TOKEN
