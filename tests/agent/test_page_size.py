"""A machine with pages of 64 KiB, as on some aarch64 hosts: data is aligned to its pages.

The test machine has pages of 4 KiB. A process gets the larger page size before it imports the
package. Multiples of 64 KiB are multiples of the real page, so all calls are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.shard_file import header_nbytes
from tests.support.checkpoints import SAVE_ID
from tests.support.stored import stored

LARGE = 2**16
REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import ctypes, json, mmap, os, sys, time
mmap.PAGESIZE = int(sys.argv[1])
from megatron_flashckpt.agent.proposals import propose_manifest
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.posix_writer import PosixWriter
from tests.support.checkpoints import SAVE_ID, persist
from tests.support.trainer import pieces_of

writes = []

def noting(self, offset, chunk, write_at=PosixWriter.write_at):
    view = memoryview(chunk)
    if not view.readonly:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        writes.append((offset, address, view.nbytes))
    write_at(self, offset, chunk)

PosixWriter.write_at = noting
store = PosixStore(sys.argv[2], DirectIo("always"))
meta = persist(store, 5, SAVE_ID, 0, 1, pieces_of(0, 1, "decoder.weight", 1_000_000))
names = [entry.name for entry in store.list("iter_0000005")]
propose_manifest(store, 5, SAVE_ID, meta, names)
slab = Slab.create(2, 5000, 70_000, "0")
other = Slab.attach(os.dup(slab.fd))
other.slots[1].set_meta(b"m" * 5000)
print(json.dumps({
    "writes": writes,
    "offsets": [slab.geometry.slot_offset(1), slab.geometry.nbytes],
}))
other.close()
slab.close()
"""


def in_a_process_with_pages_of(nbytes: int, root: Path) -> dict[str, list[list[int]]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(nbytes), str(root)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    offsets: dict[str, list[list[int]]] = json.loads(done.stdout)
    return offsets


def test_with_pages_of_64_kib_data_is_aligned_and_loads_anywhere(root: Path) -> None:
    offsets = in_a_process_with_pages_of(LARGE, root)
    assert len(offsets["writes"]) == 2, "a shard of 6 MB has two chunks"
    for offset, address, _ in offsets["writes"]:
        assert offset % LARGE == 0
        assert address % LARGE == 0
    first, _ = offsets["writes"]
    assert first[2] % LARGE == 0
    assert all(number % LARGE == 0 for number in offsets["offsets"])
    shard = root / file_names.iteration_dir(5) / file_names.shard_name(0, SAVE_ID)
    assert header_nbytes(shard.read_bytes()[:8], "it") == LARGE
    assert verify(stored(root, 5)) == [], "this process reads the file with pages of 4 KiB"
