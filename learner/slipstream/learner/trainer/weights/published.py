"""The published weights: one stream, or one for the base matrices and one for each adapter.

Matrices with adapters never change: a server needs them once, and later only the adapters.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.model.policy import NamedAdapters, Policy
from slipstream.learner.trainer.weights.bucket_fill import Kind
from slipstream.learner.trainer.weights.weight_stream import (
    Release,
    Send,
    WeightDigests,
    WeightStream,
    open_stream,
)
from slipstream.protocol.weights.buckets import Bucket, layout_to_pb
from slipstream.v1 import weights_pb2
from torch import Tensor


class Published:
    """The published weights, as streams with the same senders.

    The methods `run`, `digests` and `fill_ahead` are collective.
    """

    def __init__(
        self,
        weights: WeightStream,
        adapters: Mapping[str, WeightStream] | None = None,
        *,
        held: NamedAdapters | None = None,
        adapter_scale: float = 0.0,
    ) -> None:
        """Takes a stream of all weights, or of the base matrices if `adapters` has streams.

        `adapters` has a stream for each adapter of `held`, by name. Servers multiply an adapter's
        product by `adapter_scale` before they add it.
        """
        # All weights, or only the base matrices.
        self.weights = weights
        self._adapters, self._held = dict(adapters or {}), held
        self._adapter_scale = adapter_scale
        # Digests by name of the matrices, which never change; empty before the first pass.
        self._unchanged: dict[str, bytes] = {}
        # The newest digests of each client's adapter.
        self._of_client: dict[str, WeightDigests] = {}

    @property
    def largest_bucket(self) -> int:
        return max(stream.largest_bucket for _, stream in self._parts(adapters_alone=False))

    def num_bytes(self, *, adapters_alone: bool) -> int:
        """Returns the number of bytes that a publish sends to each receiver.

        `adapters_alone`: whether it leaves out the base matrices.
        """
        return sum(stream.num_bytes for _, stream in self._parts(adapters_alone=adapters_alone))

    def layout(self, *, adapters_alone: bool) -> weights_pb2.WeightLayout:
        """Returns the layout of the weights, from which a receiver derives the same buckets.

        `adapters_alone`: whether it leaves out the base matrices.
        """
        return layout_to_pb(
            () if adapters_alone else self.weights.tensors,
            self.weights.bucket_bytes,
            adapters=next((stream.tensors for stream in self._adapters.values()), ()),
            adapter_scale=self._adapter_scale,
            adapter_names=[name for name in self._adapters if name],
        )

    def fill_ahead(self) -> None:
        """Fills the first buckets ahead, like `WeightStream.fill_ahead`.

        If adapters are published separately, fills the buckets of the first adapter.
        """
        if self._held is not None and self._held.are_clients:
            # The model holds values that are not published.
            return
        # Between two passes the first adapter is the active one.
        next(iter(self._adapters.values()), self.weights).fill_ahead()

    def run(self, send: Send | None = None, *, adapters_alone: bool = False) -> WeightDigests:
        """Fills every bucket once, calls `send` with it on the senders, and returns all digests.

        `adapters_alone`: whether the base matrices are left out.
        """
        if not self._adapters:
            return self.weights.run(send)
        found: list[WeightDigests] = []
        first = 0
        for name, stream in self._parts(adapters_alone=adapters_alone):
            held = None if name is None else self._held
            with nullcontext() if held is None else held.published(name or ""):
                part = stream.run(None if send is None else _from(first, send))
            if name:
                # Tensors of another adapter have the same names.
                by_name = {f"{name}/{key}": d for key, d in part.by_name.items()}
                part = replace(part, by_name=by_name)
            found.append(part)
            first += len(stream.buckets)
        if not adapters_alone:
            self._check(found[0])
        return _joined(found)

    def digests(self) -> WeightDigests:
        """Returns the digests of all tensors, without sending them.

        If adapters are published separately, the result's `buckets` has only the adapters' buckets,
        and the base matrices, which do not change, are read only at the first call. `by_name` also
        has the values of clients' adapters that are not published.
        """
        if not self._adapters:
            return self.run()
        if not self._unchanged:
            self.run()
        if self._held is not None and self._held.are_clients:
            found = self._of_clients(self._held)
        else:
            found = self.run(adapters_alone=True)
        return replace(found, by_name=self._unchanged | found.by_name)

    def _of_clients(self, held: NamedAdapters) -> WeightDigests:
        """Returns the digests of clients' adapters; only those that have changed are read."""
        for name in sorted(held.changed):
            stream = self._adapters[name]
            with held.active(name):
                trained = stream.run().by_name
            with held.published(name):
                served = stream.run()
            by_name = {f"{name}/{key}": digest for key, digest in served.by_name.items()}
            by_name |= {f"{name}/trained/{key}": digest for key, digest in trained.items()}
            self._of_client[name] = replace(served, by_name=by_name)
        held.changed.clear()
        return _joined([self._of_client[name] for name in self._adapters])

    def _parts(self, *, adapters_alone: bool) -> list[tuple[str | None, WeightStream]]:
        """Returns (adapter, stream) for each stream of a pass; adapter is None for `weights`."""
        assert self._adapters or not adapters_alone
        matrices = [] if adapters_alone else [(None, self.weights)]
        return [*matrices, *self._adapters.items()]

    def _check(self, matrices: WeightDigests) -> None:
        """Raises RunFailed if a matrix changed: servers that get only adapters keep the old one."""
        before = self._unchanged or matrices.by_name
        changed = sorted(n for n, digest in matrices.by_name.items() if before[n] != digest)
        if changed:
            raise RunFailed(f"{changed[0]} is frozen, but changed during the run")
        self._unchanged = before


def open_published(policy: Policy, config: Config) -> Published:
    """Returns the streams for the setting `lora.publish`; collective."""
    if not config.lora.publishes_adapters:
        return Published(open_stream(policy, config))
    matrices, held = open_stream(policy, config, Kind.MATRICES), policy.adapters
    adapters = {}
    for name in held.names:
        # Each has its own memory: buckets of one may still travel when the next one's are filled.
        with held.active(name):
            adapters[name] = open_stream(policy, config, Kind.ADAPTERS, beside=matrices)
    # Those of clients have the factors of their products in them.
    scale = 1.0 if held.are_clients else config.lora.alpha / config.lora.rank
    return Published(matrices, adapters, held=held, adapter_scale=scale)


def _joined(parts: Sequence[WeightDigests]) -> WeightDigests:
    return WeightDigests(
        by_name={name: digest for part in parts for name, digest in part.by_name.items()},
        buckets=tuple(digest for part in parts for digest in part.buckets),
        export_s=sum(part.export_s for part in parts),
    )


def _from(first: int, send: Send) -> Send:
    def numbered(place: int, bucket: Bucket, data: Tensor) -> Release:
        return send(first + place, bucket, data)

    return numbered
