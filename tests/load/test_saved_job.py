"""Places of the copies in a saved job."""

from __future__ import annotations

from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import CopyPlace, as_copy
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.load.saved_job import SavedJob
from tests.support.worlds import sources_of


def test_copies_are_found_by_key_and_number_of_their_rank() -> None:
    main = [Piece("norm", kind, "F32", (8,), (0,), (8,), 0, 8) for kind in ("weight", "master")]
    places = [CopyPlace((0, rank), (2, 3)) for rank in (1, 2)]
    ranks = [main, *([as_copy(piece, place) for piece in main] for place in places)]
    job = SavedJob("here", sources_of(ranks), [Coordinates() for _ in ranks])
    assert job.copies == {("norm", place.offset): place for place in places}
    assert SavedJob("here", sources_of(ranks[:1]), [Coordinates()]).copies == {}
