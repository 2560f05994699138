"""A committed checkpoint in storage, as the source of a load."""

from __future__ import annotations

import dataclasses

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.collectives import run_and_agree, run_on_rank_0, this_rank
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.load.checkpoint_source import Origin, ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads, reader_threads
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.replica_sharing import ReplicaGroup, read_with_replicas
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.storage.store import Store


@dataclasses.dataclass(frozen=True)
class StorageSource:
    """See `checkpoint_source.CheckpointSource`. Each rank reads the bytes that it needs."""

    stored: StoredCheckpoint
    config: Config
    origin: Origin
    job: SavedJob
    common_state: bytes
    reads_alone: bool = True

    def open(self, plan: LoadPlan) -> ChunkReader:
        return ChunkReader(self.stored, reader_threads(self.config), plan.targets.gpu)

    def fill(self, plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        return run_and_agree(lambda: self._read(plan, reader))

    def _read(self, plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        """Read the plan's chunks. Collective over the replicas of this rank."""
        memory_nbytes = self.config.read_memory_mib * 2**20 - reader.nbytes
        sharing = ReplicaGroup(
            parallel.data_parallel_group(), self.config.share_reads, memory_nbytes
        )
        return read_with_replicas(
            reader, chunk_reads(plan.reads, plan.pieces), plan.targets, sharing
        )

    def check_whole(self) -> None:
        run_and_agree(lambda: self.stored.check_whole() if this_rank() == 0 else None)


@gc_paused()
def open_stored(store: Store, save: Save, config: Config) -> StorageSource:
    """Open a committed checkpoint; rank 0 alone reads its manifest. Collective.

    Raises:
        NotCommittedError: the checkpoint was removed since it was chosen; on every rank.
        FlashCkptError: the checkpoint is damaged; on every rank.
    """
    encoded, common_state = run_on_rank_0(lambda: _manifest_and_common_state(store, save))
    stored, job = run_and_agree(lambda: _decoded(store, save, encoded))
    saved = stored.manifest
    origin = Origin(
        *(saved.iteration, saved.save_id, "storage", saved.ancestors),
        is_release=save.iteration == RELEASE,
    )
    return StorageSource(stored, config, origin, job, common_state)


def _manifest_and_common_state(store: Store, save: Save) -> tuple[bytes, bytes]:
    encoded = read_manifest(store, save)
    return encoded, StoredCheckpoint(store, save, encoded).common()


def _decoded(store: Store, save: Save, encoded: bytes) -> tuple[StoredCheckpoint, SavedJob]:
    stored = StoredCheckpoint(store, save, encoded)
    coordinates = [shard.coordinates for shard in stored.manifest.shards]
    return stored, SavedJob(stored.place, stored.sources(), coordinates)
