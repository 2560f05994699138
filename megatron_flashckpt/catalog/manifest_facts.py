"""What an agent knows of the manifests in its save directory, without reading them again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.storage.base import Stamp, Storage, read_whole

#: Manifests whose facts are remembered: about 1 kB each.
_MOST = 4096


class KnownManifests:
    """The facts of manifests by name, size, time of change and inode. Used by several threads.

    Manifests of a job of 16,384 ranks have 10 MB each, and retention asks for all of them after
    every commit. A manifest that was replaced has another inode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, CommitFacts]] = OrderedDict()
        self.changing = threading.Lock()
        """Held from the manifest of a commit until its tracker, and while retention chooses: a
        checkpoint that the tracker is about to name must not be taken for an old one."""

    def facts(self, storage: Storage, directory: str) -> CommitFacts:
        """Return what the manifest in `directory` says of its checkpoint.

        Raises:
            FileNotFoundError: there is none.
            CorruptCheckpointError: damaged.
            FormatVersionError: written by a newer release.
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
        if storage.stamp(name) == stamp:  # else it was replaced while it was read
            with self._lock:
                self._known[place] = stamp, facts
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        return facts
