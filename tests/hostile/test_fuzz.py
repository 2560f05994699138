"""Random damage, by seed: detected or harmless, never another error, a hang or a side effect.

`FUZZ_SEEDS=100000 pytest tests/hostile/test_fuzz.py` runs more seeds.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from megatron_flashckpt.agent.proposals import propose_manifest
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.stored_checkpoint import (
    StoredCheckpoint,
    open_checkpoint,
    read_manifest,
)
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.errors import FlashCkptError, MissingStateError
from megatron_flashckpt.file_format.file_names import (
    common_name,
    iteration_dir,
    save_name,
)
from megatron_flashckpt.load.candidates import Candidates
from megatron_flashckpt.load.memory_checkpoints import HeldInMemory
from megatron_flashckpt.load.named_checkpoint import offered_by
from megatron_flashckpt.megatron_lm import side_state, side_state_codec
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.convert.made import ITERATION, contents, differing, save_as_ranks
from tests.hostile import lies
from tests.hostile.lies import FORGED, PLAIN, Damage, Scene
from tests.support.checkpoints import (
    RUN,
    SAVE_ID,
    MadeSave,
    expected,
    make,
    persist,
    pieces_of_rank,
    read,
    snapshot,
)

SEEDS = int(os.environ.get("FUZZ_SEEDS", "1000"))
RANKS = [pieces_of_rank(rank) for rank in range(4)]
SAVE_30 = save_name(RUN, 3)
WANTED = [piece for held in RANKS for piece in held]
#: Seconds after which a seed counts as a hang; the slowest seed needs less than one.
HANG_S = 60
#: More memory than all seeds need, and far less than the damaged files claim.
MEMORY_KIB = 700 * 1024


def common_of(iteration: int, **args: int) -> bytes:
    empty = dict.fromkeys(side_state.MEGATRON_STATE)
    return side_state.encode_common(
        {**empty, "args": argparse.Namespace(**args), "iteration": iteration}
    )


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that is copied for every seed."""
    home = tmp_path_factory.mktemp("good")
    make(home / "save", 10, seed=10, common=common_of(10))
    make(home / "save", 20, seed=20, common=common_of(20))
    make(home / "other", 20, lies.OTHER_SAVE, seed=21, common=common_of(20, lr=1))
    outside = home / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    shutil.copytree(home / "save/iter_0000020", outside / "iter_0000020")
    return home


class FreshCopies:
    """Fresh copies of the good save directory for each seed; files outside of it stay."""

    def __init__(self, intact: Path, home: Path, iterations: tuple[int, int] = (10, 20)) -> None:
        self._iterations = iterations
        self._good = intact
        self._home = home
        shutil.copytree(intact, home)

    def scene(self) -> Scene:
        save, outside = self._home / "save", self._home / "outside"
        shutil.rmtree(save)
        shutil.rmtree(outside / "moved", ignore_errors=True)
        shutil.copytree(self._good / "save", save)
        older, newest = (
            MadeSave(save, iteration, SAVE_ID, RANKS, iteration) for iteration in self._iterations
        )
        other = MadeSave(self._home / "other", 20, lies.OTHER_SAVE, RANKS, 21)
        return Scene(older, newest, other, outside)


@pytest.fixture
def copies(intact: Path, tmp_path: Path) -> Iterator[FreshCopies]:
    yield FreshCopies(intact, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")  # pipes would block a grep in these directories


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("hangs")

    former = signal.signal(signal.SIGALRM, give_up)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def load(scene: Scene) -> tuple[int | None, list[torch.Tensor]]:
    """Load as a job does, with all ranks in one; return the iteration and the tensors."""
    store = PosixStore(scene.root)
    candidates = Candidates(
        *(lambda: offered_by(store, None)[1], HeldInMemory(), store.place),
        rank=0,
        fall_back=True,
    )
    while (current := candidates.current) is not None:
        assert isinstance(current, Save)
        try:
            stored = StoredCheckpoint(store, current, read_manifest(store, current))
            name = common_name(stored.manifest.save_id)
            side_state_codec.decode_dict(stored.common(), name, side_state.MEGATRON_STATE)
            try:
                tensors = read(stored, WANTED)
            except MissingStateError:
                stored.check_whole()
                raise
        except FlashCkptError as error:
            candidates.refuse(error)
        else:
            candidates.report()
            return current.iteration, tensors
    return None, []


CONTENT = {iteration: expected(WANTED, iteration) for iteration in (10, 20, 30)}


def is_exact(tensors: list[torch.Tensor], iteration: int) -> bool:
    pairs = zip(tensors, CONTENT[iteration], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def damages(scene: Scene) -> list[FlashCkptError]:
    try:
        return verify(open_checkpoint(PosixStore(scene.root), 20))
    except FlashCkptError as error:
        return [error]


def run_seeds(
    copies: FreshCopies,
    kinds: list[Damage],
    seeds: range,
    check: Callable[[Scene, Damage, random.Random], None],
) -> None:
    """Apply one kind of damage per seed, run `check`, and check files outside and memory."""
    before = peak_kib()
    for seed in seeds:
        dice = random.Random(seed)
        damage = kinds[seed % len(kinds)]
        scene = copies.scene()
        damage(scene, dice)
        outside = snapshot(scene.outside)
        signal.alarm(HANG_S)
        try:
            check(scene, damage, dice)
            assert snapshot(scene.outside) == outside
        except Exception as error:
            raise AssertionError(f"seed {seed}, {damage.__name__}: {error!r}") from error
    assert peak_kib() - before < MEMORY_KIB


def test_a_damaged_checkpoint_is_detected_and_the_older_one_is_loaded(copies: FreshCopies) -> None:
    """Digests cover every bit of a checkpoint, including padding."""

    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        save = snapshot(scene.root)
        iteration, tensors = load(scene)
        assert iteration == 10
        assert is_exact(tensors, 10)
        assert damages(scene)
        assert snapshot(scene.root) == save

    # A manifest of another iteration tells of a renamed directory, which stops the load.
    renamed = (lies.of_another_iteration, lies.no_directory)
    kinds = [damage for damage in PLAIN if damage not in renamed]
    run_seeds(copies, kinds, range(SEEDS // 2), check)


def test_a_forged_checkpoint_is_refused_or_loads_exact_tensors(copies: FreshCopies) -> None:
    """A forgery may change fields that no load reads, such as the description."""
    refused = 0

    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        nonlocal refused
        save = snapshot(scene.root)
        try:
            iteration, tensors = load(scene)
        except FlashCkptError:
            refused += 1
        else:
            assert iteration in (10, 20)
            assert is_exact(tensors, iteration)
            refused += iteration == 10
            if iteration == 10:
                assert damages(scene) or damage is lies.pickle_bomb
        assert snapshot(scene.root) == save

    run_seeds(copies, FORGED, range(SEEDS // 4), check)
    assert refused > SEEDS // 4 / 2


def test_a_damaged_tracker_hides_no_checkpoint(copies: FreshCopies) -> None:
    """A tracker has no digest, so a load follows a tracker that names another iteration."""

    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        named = None
        if scene.tracker.is_file() and not scene.tracker.is_symlink():
            with open(scene.tracker, "rb") as file:
                named = file.read(100)
        iteration, tensors = load(scene)
        assert iteration == (10 if named == b"10" else 20)
        assert is_exact(tensors, iteration)
        assert main(["ls", str(scene.root)]) in (0, 1)
        assert main(["verify", str(scene.root)]) in (0, 1)

    run_seeds(copies, [lies.tracker], range(SEEDS // 10), check)


def test_the_command_line_reports_damage_without_a_traceback(
    copies: FreshCopies, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        save = snapshot(scene.root)
        command = [["ls"], ["inspect"], ["inspect", "--json"], ["verify"]][dice.randrange(4)]
        status = main([*command, str(scene.root)])
        shown = capsys.readouterr()
        assert status in (0, 1)
        assert "Traceback" not in shown.out + shown.err
        if command == ["verify"] and damage in PLAIN:
            assert status == 1
            assert "iter_0000020" in shown.out + shown.err
        assert snapshot(scene.root) == save

    run_seeds(copies, PLAIN + FORGED, range(10_000, 10_000 + SEEDS // 5), check)


def test_a_conversion_refuses_a_damaged_source_or_is_exact(tmp_path: Path) -> None:
    made = contents()
    for name in ("outside", "other"):
        (tmp_path / "good" / name).mkdir(parents=True)
    (tmp_path / "good/outside/precious").write_bytes(b"precious")
    save_as_ranks(made, tmp_path / "good/save", 4)
    copies = FreshCopies(tmp_path / "good", tmp_path / "copy", (ITERATION, ITERATION))
    converted = 0

    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        nonlocal converted
        save, result = snapshot(scene.root), tmp_path / "result"
        status = main(["convert", str(scene.root), str(result), "--to", "flashckpt"])
        assert status == 1 or (status == 0 and damage not in PLAIN)
        if status == 0:
            converted += 1
            written = open_ours(PosixStore(result), ITERATION, Options())
            assert differing(made.tensors, written.tensors) == []
        assert status == 0 or not any(result.glob("*/*.safetensors"))
        assert snapshot(scene.root) == save
        shutil.rmtree(result, ignore_errors=True)

    of_other_files = (lies.of_another_iteration, lies.of_another_save, lies.no_directory)
    kinds = [damage for damage in PLAIN + FORGED if damage not in of_other_files]
    run_seeds(copies, kinds, range(20_000, 20_000 + SEEDS // 12), check)
    assert converted < SEEDS // 24


# ---------------------------------------------------------------- the agent's commit


def record_lie(scene: Scene, dice: random.Random) -> None:
    """Replace a record of a save before its commit; the agent's own tests have other contents."""
    file = dice.choice(sorted((scene.root / iteration_dir(30)).glob("*.record")))
    if dice.random() < 0.2:
        os.truncate(file, 2**40)
    else:
        lies.in_place(file, scene.outside, dice)


def test_a_record_that_is_no_file_or_huge_fails_its_save_alone(
    intact: Path, tmp_path: Path
) -> None:
    shutil.copytree(intact, tmp_path / "good")
    store = PosixStore(tmp_path / "good/save")
    metas = [persist(store, 30, SAVE_30, rank, len(RANKS), held) for rank, held in enumerate(RANKS)]
    names = [entry.name for entry in store.list(iteration_dir(30))]
    copies = FreshCopies(tmp_path / "good", tmp_path / "copy")

    def check(scene: Scene, damage: Damage, dice: random.Random) -> None:
        before = snapshot(scene.root)
        with pytest.raises(FlashCkptError):
            propose_manifest(PosixStore(scene.root), 30, SAVE_30, metas[0], names)
        assert snapshot(scene.root) == before

    run_seeds(copies, [record_lie], range(SEEDS // 20), check)
    shutil.rmtree(tmp_path / "copy")  # pipes would block a grep in these directories
