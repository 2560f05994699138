"""Cache of an agent's facts about the manifests in its save directory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.storage.base import Stamp, Storage, read_whole

#: Manifests whose facts are cached, at most; about 1 kB per manifest.
_MOST = 4096


class KnownManifests:
    """Facts of manifests by name, size, time of change and inode. Thread-safe.

    A manifest of 16,384 ranks has 10 MB, and retention needs the facts of all manifests after every
    commit. A replaced manifest has another inode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, CommitFacts]] = OrderedDict()
        self.changing = threading.Lock()
        """Held by a commit from its manifest until its tracker, and while retention selects
        checkpoints: retention must keep a checkpoint that the tracker is about to name."""

    def facts(self, storage: Storage, directory: str) -> CommitFacts:
        """Return the facts in the manifest of `directory`.

        Raises:
            FileNotFoundError: no manifest.
            CorruptCheckpointError: the manifest is damaged.
            FormatVersionError: a newer release wrote the manifest.
        """
        name = f"{directory}/{file_names.MANIFEST}"
        place = f"{storage.place}/{name}"
        stamp = storage.stamp(name)
        with self._lock:
            known_stamp, known = self._known.get(place, (None, None))
            if known is not None and known_stamp == stamp:
                self._known.move_to_end(place)
                return known
        encoded = read_whole(storage, name, manifest.MAX_MANIFEST_NBYTES)
        facts = manifest.decode_facts(encoded, place)
        if storage.stamp(name) == stamp:  # else the manifest was replaced during the read
            with self._lock:
                self._known[place] = stamp, facts
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        return facts
