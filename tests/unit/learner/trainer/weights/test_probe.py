import numpy as np
from slipstream.learner.trainer.weights.weight_publisher import probe_sequences
from support.fakes.fake_controller import make_batch, with_branches


def test_probe_takes_sequences_from_the_whole_batch_and_cuts_them() -> None:
    batch = make_batch(0, num_groups=4, group_size=5, vocab_size=9, max_tokens=30)
    probes = probe_sequences(batch, vocab_size=9, max_tokens=7)
    expected = [
        batch.trajectories[place].token_ids[:7].tolist() for place in range(0, 16, 2)
    ]
    assert [token_ids.tolist() for token_ids in probes] == expected


def test_probe_takes_branches_as_the_model_saw_them() -> None:
    batch_made = make_batch(0, num_groups=1, group_size=2, vocab_size=9, max_tokens=30)
    batch = with_branches(batch_made, vocab_size=9, max_tokens=30)
    probes = probe_sequences(batch, vocab_size=9, max_tokens=30)
    assert [len(token_ids) for token_ids in probes] == batch.lengths
    whole = np.concatenate([t.token_ids for t in batch.trajectories])
    assert np.concatenate(probes).tolist() == whole.tolist()


def test_probe_of_a_small_batch_takes_all_of_it() -> None:
    batch = make_batch(0, num_groups=1, group_size=3, vocab_size=9, max_tokens=6)
    assert len(probe_sequences(batch, vocab_size=9, max_tokens=7)) == 3


def test_probe_before_the_first_batch_is_the_same_each_time() -> None:
    first = probe_sequences(None, vocab_size=9, max_tokens=64)
    second = probe_sequences(None, vocab_size=9, max_tokens=64)
    assert [x.tolist() for x in first] == [x.tolist() for x in second]
    assert [len(x) for x in first] == [8, 11, 14, 18, 21, 25, 28, 32]
    assert max(x.max() for x in first) < 9
    assert max(len(x) for x in probe_sequences(None, vocab_size=9, max_tokens=15)) == 15
