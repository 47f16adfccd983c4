"""Whose turn it is among operations that wait, and which of them have none any more; no I/O.

Operations of one stream have turns in the order of their numbers, streams one after another.
"""

from collections.abc import Callable, Iterable

from slipstream.extensions.tinker.models import Entry, Model, Models
from slipstream.v1 import trainer_pb2


class Turns:
    """The operations that wait for their turns."""

    def __init__(
        self,
        models: Models,
        *,
        unloadable: Callable[[str, str], str],
        fail: Callable[[Entry, str], None],
    ) -> None:
        """Takes what says why a new stream cannot load a name, and what ends an operation."""
        self._models = models
        self._unloadable = unloadable
        self._fail = fail
        # Operations whose turn has not come, by stream and number, and first ones of new streams.
        self._waiting: dict[tuple[str, int], Entry] = {}
        self._first: list[Entry] = []
        # The operation that the trainer had when the controller started.
        self.resumed: Entry | None = None

    def add(self, entry: Entry) -> None:
        """Lets an operation wait for its turn, or ends it if that does not come."""
        operation = entry.operation
        model = self._models.by_stream.get(operation.stream)
        if operation.number == 0:
            self._first.append(entry)
        elif model is None and operation.stream not in self._new_streams():
            cause = f"model {operation.stream} is not trained by this run any more: a newer one is"
            self._fail(entry, cause)
        elif model is not None and operation.number < model.next:
            cause = f"{operation.id} was carried out; its result is not kept any more"
            self._fail(entry, cause)
        else:
            self._waiting[operation.stream, operation.number] = entry
            if model is not None:
                model.touch()

    def take(self) -> Entry | None:
        """Returns the operation whose turn it is, if there is one; a new stream gets its model."""
        entry = self.resumed
        self.resumed = None
        if entry is None and self._models.are_several:
            entry = self._take_first()
        for model in self._models.by_stream.values():
            entry = entry or self._waiting.pop((model.stream, model.next), None)
        return entry or self._take_first()

    def behind(self, model: Model, number: int) -> Entry | None:
        """Returns the operation of a model that waits with the number behind `number`."""
        return self._waiting.get((model.stream, number + 1))

    def num_of(self, session: str) -> int:
        """Returns how many operations of a session wait."""
        return sum(stream.partition(":")[0] == session for stream, _ in self._waiting)

    def missing(self) -> str:
        """Returns the operation that others wait for and nobody has sent, for users, or ""."""
        for stream, _ in self._waiting:
            if model := self._models.by_stream.get(stream):
                return f"operation {model.next} of {stream}, behind which later ones wait"
        return ""

    def end_lost(self) -> None:
        """Ends the operations whose stream has no model any more."""
        coming = self._new_streams()
        for stream, number in list(self._waiting):
            if stream not in self._models.by_stream and stream not in coming:
                self.add(self._waiting.pop((stream, number)))

    def _new_streams(self) -> Iterable[str]:
        return {entry.operation.stream for entry in self._first}

    def _take_first(self) -> Entry | None:
        """Returns the first operation of a stream that gets a model, or None if there is none."""
        if not self._first:
            return None
        for model in self._models.by_stream.values():
            if (model.stream, model.next) in self._waiting:
                # A model that waits for its turn is not silent.
                model.touch()
        entry = self._first.pop(0)
        operation = entry.operation
        adapter = operation.begin.adapter
        cause = ""
        match entry.kind:
            case "begin":
                pass
            case "load":
                name = operation.load.name
                cause = self._unloadable(name, operation.stream)
                newest = self._models.newest(name, operation.stream)
                if newest is not None:
                    adapter = newest.adapter
                    entry.is_made = True
                elif not cause and (saved := self._models.named[name].model):
                    adapter = trainer_pb2.Adapter(
                        rank=saved.adapter.rank, alpha=saved.adapter.alpha
                    )
            case "refused":
                cause = operation.refused.cause
            case _:
                cause = f"{operation.id} has number 0, which is that of a model's beginning"
        if not cause and not entry.is_made:
            cause = self._models.refusal(operation.stream)
        if cause:
            self._fail(entry, cause)
        else:
            self._models.take(operation.stream, adapter)
        self.end_lost()
        return None if cause else entry
