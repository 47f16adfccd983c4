"""The state that several parts of the controller read and change."""

from dataclasses import dataclass

from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import AccountedReceiver, TokenLedger
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.tasks.environments import EnvironmentBook


@dataclass(frozen=True)
class Books:
    """The leases, environments, servers, journal with its state, tokens and queue of a run.

    A run has one object of each, which several parts of the controller share.
    """

    leases: LeaseBook
    environments: EnvironmentBook
    fleet: Fleet
    journal: Journal
    # What only appending to the journal changes.
    state: RunState
    ledger: TokenLedger
    queue: AccountedReceiver
