"""Files of kept calls: what is read again, of whole files and of damaged ones."""

from pathlib import Path

import pytest
from slipstream.extensions.agent_recovery import call_store
from slipstream.extensions.agent_recovery.call_store import CallStore, EpisodeFull
from support.fakes.call_requests import call, episode


def numbers(files: CallStore, **name) -> list[int]:
    requests = files.calls(episode(**name))
    return [request.call for request in requests]


def numbers_by_member(files: CallStore) -> list[list[int]]:
    return [
        numbers(
            files,
            member=member,
        )
        for member in range(3)
    ]


def test_calls_of_all_attempts_come_back_once_and_in_their_order(
    tmp_path: Path,
) -> None:
    files = CallStore(tmp_path / "calls")
    assert numbers(files) == []
    second_attempt = call(1, attempt=1)
    next_epoch = call(1, epoch=10)
    for request in (call(1), call(2), call(2), second_attempt, next_epoch):
        files.keep(request)
    files.keep(call(7, member=1))
    expected = [
        call(1),
        call(2),
        second_attempt,
        next_epoch,
    ]
    assert files.calls(episode()) == expected
    assert numbers(files, member=1) == [7]


def test_forgotten_calls_are_gone_and_others_stay(tmp_path: Path) -> None:
    files = CallStore(tmp_path / "calls")
    for member in range(3):
        files.keep(call(1, member=member))
    files.forget(episode(member=0))
    files.forget(episode(member=0))
    assert numbers_by_member(files) == [
        [],
        [1],
        [1],
    ]
    paths = files.paths()
    # Began after the files were listed: whoever named the open episodes may not know it.
    files.keep(call(1, member=3))
    files.forget_others(
        paths,
        {
            ("g000001", 2),
            ("g000002", 0),
        },
    )
    assert numbers(files, member=3) == [1]
    assert numbers_by_member(files) == [
        [],
        [],
        [1],
    ]
    files.close()
    assert not (tmp_path / "calls").exists()
    assert numbers(files, member=2) == []


def test_every_damage_leaves_the_calls_before_it(tmp_path: Path) -> None:
    files = CallStore(tmp_path)
    for number in (1, 2, 3):
        files.keep(call(number))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    size = len(data) // 3
    for end in range(len(data)):
        num_whole = end // size
        path.write_bytes(data[:end])
        assert (
            numbers(files)
            == [
                1,
                2,
                3,
            ][:num_whole]
        )
    for place in range(len(data)):
        num_whole = place // size
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert (
            numbers(files)
            == [
                1,
                2,
                3,
            ][:num_whole]
        )


def test_an_episode_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CallStore(tmp_path)
    monkeypatch.setattr(
        call_store,
        "MAX_EPISODE_BYTES",
        3 * call(1).ByteSize(),
    )
    files.keep(call(1))
    files.keep(call(2))
    with pytest.raises(EpisodeFull):
        files.keep(call(3))
    assert numbers(files) == [1, 2]
