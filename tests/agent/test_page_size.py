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


def test_with_pages_of_64_kib_data_is_aligned_and_loads_anywhere(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(LARGE), str(root)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["writes"]) == 2, "a shard of 6 MB has two chunks"
    aligned = [number for offset, address, _ in result["writes"] for number in (offset, address)]
    aligned += [result["writes"][0][2], *result["offsets"]]
    assert [number % LARGE for number in aligned] == [0] * len(aligned)
    shard = root / file_names.iteration_dir(5) / file_names.shard_name(0, SAVE_ID)
    assert header_nbytes(shard.read_bytes()[:8], "it") == LARGE
    assert verify(stored(root, 5)) == [], "this process reads the file with pages of 4 KiB"
