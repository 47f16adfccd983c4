"""Results of operations, on the disk before they are told, and what of operations is forgotten.

Consumes: operations that have ended. Produces: files, results for clients. Waits for: the disk.
Unblocked by: the end of a write.
"""

import asyncio
from pathlib import Path

from slipstream.extensions.tinker.models import Entry, Models
from slipstream.extensions.tinker.operation_store import OperationStore
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import ControlledRun
from slipstream.protocol.checkpoints import complete_steps
from slipstream.v1 import operations_pb2 as pb

# Most samples that are kept for clients that have not asked for them.
MAX_UNTOLD = 65536
# Operations that have ended stay at least until so many others have, too.
MIN_KEPT = 1024


class OperationResults:
    """Writes results in the order in which operations end, and removes what is spent."""

    def __init__(
        self,
        run: ControlledRun,
        state: RunState,
        store: OperationStore,
        checkpoints: Path,
        entries: dict[str, Entry],
        models: Models,
    ) -> None:
        """Takes all operations by id, of which those that are spent go."""
        self._run = run
        self._state = state
        self._store = store
        self._checkpoints = checkpoints
        self._entries = entries
        self._models = models
        # Results to write, and operations that have lost their sequences.
        self.queue: asyncio.Queue[Entry] = asyncio.Queue()
        # Operations that have ended since this start.
        self._num_ended = 0

    async def write(self) -> None:
        """Writes what comes, for ever."""
        while True:
            entry = await self.queue.get()
            if entry.ended.is_set():
                assert entry.place is not None
                # Without its sequences, unless it went meanwhile.
                if entry.operation.id in self._entries:
                    await asyncio.to_thread(self._store.write, entry.place, entry.operation)
                continue
            if entry.place is not None:
                await asyncio.to_thread(self._store.end, entry.place, entry.result)
                entry.step = entry.result.step
                entry.result = pb.OperationResult()
            # The operations are in the order of their ends.
            self._entries[entry.operation.id] = self._entries.pop(entry.operation.id)
            entry.ended.set()
            entry.tell()
            self._num_ended += 1
            if self._num_ended % MIN_KEPT == 0:
                await self._forget()
            self._run.signal.notify(gathered=entry.place is None)

    async def _forget(self) -> None:
        """Removes what is spent: told, covered by a checkpoint, and not needed after a restart.

        A sample need not be covered; of those that nobody has asked for the oldest go.
        """
        ended = [entry for entry in self._entries.values() if entry.ended.is_set()]
        old = ended[:-MIN_KEPT]
        covered = self._state.checkpoint.step
        lasting = self._models.lasting(complete_steps(self._checkpoints))
        spent = [
            entry
            for entry in old
            if entry.is_told and entry.step <= covered and entry not in lasting
        ]
        untold = [entry for entry in old if entry.place is None and not entry.is_told]
        spent += untold[:-MAX_UNTOLD]
        for entry in spent:
            del self._entries[entry.operation.id]
        places = [entry.place for entry in spent if entry.place is not None]
        await asyncio.to_thread(self._store.remove, places)
