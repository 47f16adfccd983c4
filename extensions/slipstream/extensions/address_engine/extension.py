"""Rollout servers sample by a vLLM server at an address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Need

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.rollout_server.engine_url is not None


_ONE_ENGINE = "one rollout server has the address for itself"
_NO_AGENTS = "agents call an engine of the server's own"
_WHOLE_MODEL = "the address loads whole models, and no adapters"

EXTENSION = Extension(
    name="address_engine",
    is_on=_is_on,
    title="rollout_server.engine_url",
    needs=(
        Need("rollout_server.count", only=1, because=_ONE_ENGINE),
        Need(
            "weights.transport",
            only="gloo",
            because="the rollout server itself receives the weights, in main memory",
        ),
        Need("weights.storage_url", only=None, because="versions in storage need its own engine"),
        Need(
            "weights.verify_every",
            only=1,
            because="only a probe of each version tells what the address computes with",
        ),
        Need(
            "controller.turns", only="off", because="an engine at an address gives no memory back"
        ),
        Need("controller.client_loop", only=False, because="a client's loop was not tried with it"),
        Need("lora.rank", only=0, because=_WHOLE_MODEL),
        Need("agents.listen", only=None, because=_NO_AGENTS),
        Need("agents.recover", only=False, because=_NO_AGENTS),
        Need("sampling.max_images", only=0, because="images are not sent to an address"),
        Need("algorithm.router_replay", only="off", because="an address records no experts"),
        Need("algorithm.agreement", only="close", because="its kernels are not the learner's"),
    ),
    rules="slipstream.extensions.address_engine.settings:problems",
    checks="slipstream.extensions.address_engine.launch:CHECKS",
    engine="slipstream.extensions.address_engine.server.engine:start",
)
