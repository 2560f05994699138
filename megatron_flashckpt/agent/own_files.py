"""Files in `flashckpt/` that the choice of a checkpoint needs, kept there while their run trains.

Somebody may remove this folder under a running job. Until the next commit, a load could then not
tell the tracker from a person's wish, which excludes newer checkpoints in memory.
"""

from __future__ import annotations

import contextlib
import logging

from megatron_flashckpt.errors import AlreadyExistsError
from megatron_flashckpt.file_format.file_names import TRACKED, run_file, run_number
from megatron_flashckpt.file_format.run_object import RunObject, encode_run
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

_NBYTES = 2**20


class OwnFiles:
    """The object of a run, and the tracker's twin as it was last seen during that run.

    An edited tracker stays a wish, because the twin comes back with its former contents. Files are
    created, never replaced: what another process has put there meanwhile stays.
    """

    def __init__(self) -> None:
        self._run = ""
        self._twin: bytes | None = None

    def keep(self, store: Store, run: RunObject) -> None:
        """Create the missing ones of the files; the caller has seen that the run trains.

        Raises:
            StorageError: the store does not answer, or refuses the files.
        """
        if self._run != run.name:
            # Before a run starts, a missing twin is a person's will.
            self._run, self._twin = run.name, None
        missing: dict[str, bytes] = {}
        try:
            self._twin = store.get(TRACKED, 0, _NBYTES)
        except FileNotFoundError:
            if self._twin is not None:
                missing[TRACKED] = self._twin
        # The object comes last: with an object but without the twin, no tracker is a wish.
        name = run_file(run_number(run.name))
        if store.stat(name) is None:
            missing[name] = encode_run(run)
        made = []
        for name, contents in missing.items():
            with contextlib.suppress(AlreadyExistsError):  # it came into view late
                store.create(name, contents)
                made.append(name)
        if made:
            logger.warning(
                "%s: %s: removed while run %s trains, and made again: remove 'flashckpt/' only "
                "while no job uses the directory",
                *(store.place, ", ".join(made), run.name),
            )
