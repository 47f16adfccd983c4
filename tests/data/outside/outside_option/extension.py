"""The manifest of the option; `[extensions.outside]` or `[counted]` switches it on."""

from slipstream.core.extension import Extension, Need, Queue
from slipstream.core.settings.function_table import Estimator

from outside_option.settings import MedianArguments

EXTENSION = Extension(
    name="outside",
    settings="outside_option.settings:OutsideSection",
    tables={"counted": "outside_option.settings:CountedSection"},
    needs=(
        Need(
            "algorithm.epochs",
            only=1,
            because="its part counts each trajectory once",
        ),
    ),
    checks="outside_option.launch:CHECKS",
    trainer="outside_option.trainer:CountedSteps",
    queues={
        "noted": Queue(
            sender="outside_option.noted_queue:sender",
            receiver="slipstream.learner.controller.records.ledger:grpc_receiver",
        ),
    },
    algorithms={
        "advantage": {
            "group_median": Estimator(
                MedianArguments,
                compares_group=True,
                place="outside_option.advantage:group_median",
            ),
        },
    },
)
