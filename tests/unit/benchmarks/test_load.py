"""The servers and the trainer with which the controller's load is measured."""

from pathlib import Path

from support.rigs.controller_runs import make_config, play

from benchmarks.controller.load import QUEUE_BYTES, LoadServer, LoadTrainer


async def test_all_tokens_of_the_load_are_trained_and_none_is_missing(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, run__steps=20, queue__max_bytes=QUEUE_BYTES)
    address = config.controller.address
    tokens = (4, 8)
    servers = [LoadServer(address, number, tokens) for number in range(2)]
    summary = await play(config, *servers, trainer=LoadTrainer(address))
    ledger = summary["ledger"]
    assert (summary["code"], summary["steps"]) == (0, 20)
    assert ledger["trained"] == 20 * 4 * 4 * 8
    assert ledger["difference"] == 0
