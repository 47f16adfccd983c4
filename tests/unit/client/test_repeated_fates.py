"""Commands name each fate of a token that the ledger has."""

from slipstream.client.status import fates
from slipstream.client.verified_results import OTHER_FATES, RECORDED_FATES
from slipstream.learner.controller.records.ledger import FATES


def test_the_fates_of_a_ledger_are_all_shown() -> None:
    ledger = dict.fromkeys(FATES, 1) | {"generated": len(FATES), "difference": 0}
    shown = fates(ledger)
    assert [fate for fate in FATES if f"{fate.replace('_', ' ')} 1" not in shown] == []


def test_the_fates_of_a_ledger_are_all_verified() -> None:
    verified = {*RECORDED_FATES, *OTHER_FATES} - {"difference"}
    assert verified == {*FATES}
