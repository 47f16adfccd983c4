import torch
from slipstream.learner.trainer.weights.bucket_fill import Copies, dense_blocks


def pieces(target: torch.Tensor, source: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(block.shape) for block, _ in dense_blocks(target, source)]


def test_contiguous_copies_are_one_piece_and_fused_heads_one_for_each_group() -> None:
    tensor = torch.zeros(6, 4)
    assert pieces(tensor, torch.ones(6, 4)) == [(6, 4)]
    # Two groups of (2 queries, key, value), heads of 3 rows.
    fused = torch.ones(2 * 4 * 3, 5).view(2, 4, 3, 5)
    assert pieces(torch.zeros(2, 2, 3, 5), fused[:, :2]) == [(2, 3, 5), (2, 3, 5)]
    assert pieces(torch.zeros(2, 3, 5), fused[:, 3]) == [(3, 5), (3, 5)]


def test_copies_that_would_fall_into_many_pieces_stay_whole() -> None:
    columns = torch.zeros(65, 8)[:, :4]
    assert pieces(columns, torch.ones(65, 4)) == []
    assert pieces(columns[:64], torch.ones(64, 4)) == [(4,)] * 64


def test_all_copies_are_done_and_change_the_element_type() -> None:
    sources = [
        torch.rand(6, 4),
        torch.rand(70, 8)[:, :4],
        torch.rand(2, 4, 3, 5)[:, 1:3],
    ]
    # A tensor that is large enough to be copied by itself.
    sources.append(torch.rand(9 << 20).bfloat16())
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    copies = Copies(zip(targets, sources, strict=True))
    copies.run()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.bfloat16())
    sources[1].fill_(2.0)
    copies.run()
    assert bool((targets[1] == 2.0).all())
    Copies([]).run()
