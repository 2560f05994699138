"""Saves of real DLRover equal saves of stock Megatron of the same state, and damage is reported.

The archives hold files of DLRover 0.6.1 and of stock Megatron, made by
`tools/compat/dlrover_files.py`.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.cli import commands
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError, UnsupportedError
from tests.convert.made import differing
from tests.support.megatron_jobs import same

FILES = Path(__file__).parent / "dlrover_files"
LEGACY, GATHER = "cb995d5-tp2dp2-buckets", "cb995d5-dp2-gather"
ARCHIVES = (LEGACY, "cb995d5-pp2dp2-tied", "core_v0.8.0-pp2dp2-tied")
NEWEST, OLDER = "iter_0000004", "iter_0000002"
NOTE = "did not save the optimizer's step count, so the iteration, 4, is used instead"


def unpacked(name: str, where: Path) -> Path:
    with tarfile.open(FILES / f"{name}.tar.xz") as archive:
        archive.extractall(where, filter="data")
    return where


@pytest.fixture(scope="module", params=ARCHIVES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same save twice: `stock` and `dlrover`."""
    return unpacked(request.param, tmp_path_factory.mktemp(request.param))


def test_tensors_of_dlrover_equal_those_of_megatrons_files(saved: Path) -> None:
    dlrovers = open_source(saved / "dlrover", None, Options())
    stocks = open_source(saved / "stock", None, Options())
    assert (dlrovers.format, stocks.format) == ("dlrover", "torch")
    tensors = dlrovers.contents.tensors
    assert {tensor.kind for tensor in tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert differing(tensors, stocks.contents.tensors) == []
    assert dlrovers.contents.common.keys() == stocks.contents.common.keys()
    assert same(dlrovers.contents.optimizer, stocks.contents.optimizer)
    for source in (dlrovers, stocks):
        assert ["tied embeddings" in warning for warning in source.contents.warnings] == (
            [True] if "cb995d5-pp2" in str(saved) else []
        )


def test_weights_saved_before_their_all_gather_are_read_from_the_masters(
    tmp_path: Path,
) -> None:
    """Megatron cb995d5 gathers weights in the next step; stock saved its file after training."""
    saved = unpacked(GATHER, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="save the weights before the last"):
        open_source(saved / "dlrover", None, Options())
    dlrovers = open_source(saved / "dlrover", None, Options(accept_damage=True)).contents
    stocks = open_source(saved / "stock", None, Options()).contents
    assert differing(dlrovers.tensors, stocks.tensors) == []
    assert ["--overlap-param-gather" in warning for warning in dlrovers.warnings] == [True]
    weights = open_source(saved / "dlrover", None, Options(weights_only=True)).contents
    assert ["may have saved the weights before" in warning for warning in weights.warnings] == [
        True
    ]


def test_a_legacy_gpt_is_written_only_in_formats_that_its_jobs_load(
    legacy: Path, tmp_path: Path
) -> None:
    opened = open_source(legacy / "dlrover", None, Options())
    with pytest.raises(UnsupportedError, match="legacy GPT, whose jobs cannot load torch_dist"):
        convert(opened, tmp_path / "destination", "torch_dist", Options())
    assert not (tmp_path / "destination").exists()


def test_a_dlrover_save_converted_twice_equals_megatrons_files(saved: Path, tmp_path: Path) -> None:
    options = Options()
    convert(open_source(saved / "dlrover", None, options), tmp_path / "ours", "flashckpt", options)
    convert(open_source(tmp_path / "ours", None, options), tmp_path / "torch", "torch", options)
    files = sorted((saved / "stock" / NEWEST).rglob("*.pt"))
    assert len(files) == 4
    for file in files:
        name = file.relative_to(saved / "stock")
        ours, stocks = (
            torch.load(root / name, weights_only=False)
            for root in (tmp_path / "torch", saved / "stock")
        )
        if "args" in stocks:
            # All ranks get the value of the first rank.
            ours["args"], stocks["args"] = (
                {key: value for key, value in vars(state["args"]).items() if key not in UNLIKE}
                for state in (ours, stocks)
            )
            assert order(ours["model"]) == order(stocks["model"])
            # In stock's files the embeddings of the first and the last stage differ.
            for state in (ours, stocks) if "tied" in str(saved) else ():
                state["model"].pop("word_embeddings_for_head", None)
        elif "cb995d5-pp2" in str(saved) and name.parent.name.endswith("_001"):
            continue
        assert same(plain(ours), plain(stocks)), file
    again, stocks = (
        open_source(root, None, options).contents.tensors
        for root in (tmp_path / "torch", saved / "stock")
    )
    assert differing(again, stocks) == []


def plain(state: Any) -> Any:
    """Return `state` with plain dictionaries."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return state


#: Arguments that differ between ranks, or name the save directory.
UNLIKE = ("rank", "local_rank", "save", "load")


def order(state: Any) -> list[Any]:
    """Return the names in a nested state dict in their order."""
    return [
        (name, order(value)) if isinstance(value, dict) else name for name, value in state.items()
    ]


# ---------------------------------------------------------------------- missing parts


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(LEGACY, tmp_path_factory.mktemp("legacy"))


@pytest.fixture
def broken(legacy: Path, tmp_path: Path) -> Path:
    """Return a copy of DLRover's save."""
    return Path(shutil.copytree(legacy / "dlrover", tmp_path / "broken"))


def change_states(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state dicts of all ranks."""
    for file in directory.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)


def test_missing_param_groups_are_rebuilt_from_args_with_a_guessed_step(
    legacy: Path, broken: Path
) -> None:
    """Early releases of DLRover wrote no `optimizer` to the model files."""
    change_states(broken, lambda state: state.pop("optimizer"))
    guessed = open_source(broken, None, Options()).contents
    complete = open_source(legacy / "dlrover", None, Options()).contents
    (rebuilt,), (expected,) = guessed.optimizer, complete.optimizer
    assert [group["step"] for group in expected["param_groups"]] == [4, 4]
    assert rebuilt["step"] == 4
    # Fields that the saved scheduler sets at its load, and fields of later releases.
    unlike = ("step", "lr", "weight_decay", "max_lr", "min_lr", "is_decoupled_lr", "default_config")
    kept = [
        [{key: value for key, value in group.items() if key not in unlike} for group in groups]
        for groups in (rebuilt["param_groups"], expected["param_groups"])
    ]
    assert kept[0] == kept[1]
    assert [NOTE in warning for warning in guessed.warnings] == [True]


@pytest.mark.parametrize("flag", [{"decoupled_lr": 0.1}, {"use_mup": True}], ids=str)
def test_missing_param_groups_of_decoupled_lr_or_mup_are_refused(
    broken: Path, flag: dict[str, Any]
) -> None:
    change_states(broken, lambda state: state.pop("optimizer"))
    change_states(broken, lambda state: vars(state["args"]).update(flag))
    with pytest.raises(UnsupportedError, match="did not save the optimizer's param groups"):
        open_source(broken, None, Options())
    open_source(broken, None, Options(weights_only=True))


def remove_files(directory: Path) -> None:
    torch.save({}, directory / "rank_00001/distrib_optim.pt")
    (directory / "rank_00002/distrib_optim.pt").unlink()
    torch.save([None], directory / "rank_00003/distrib_optim.pt")


def remove_optimizers(directory: Path) -> None:
    for rank in range(4):
        torch.save([None], directory / f"rank_{rank:05d}/distrib_optim.pt")


def remove_directories(pattern: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for path in directory.glob(pattern):
            shutil.rmtree(path)

    return damage


def older(*names: str) -> Callable[[Path], None]:
    """Return a function that mixes directories of the previous iteration into a DLRover save."""

    def damage(directory: Path) -> None:
        for name in names:
            shutil.rmtree(directory / name)
            shutil.copytree(directory.parent / OLDER / name, directory / name)

    return damage


def exchange(directory: Path) -> None:
    one, other = directory / "rank_00000", directory / "rank_00003"
    one.rename(directory / "aside")
    other.rename(one)
    (directory / "aside").rename(other)


def one_rank_more(directory: Path) -> None:
    shutil.copytree(directory / "rank_00003", directory / "rank_00004")


#: Damage by name, and the facts in the error message.
DAMAGE: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "some optimizer files missing": (
        remove_files,
        [
            *("3 of 4 ranks have no optimizer tensors", "rank_00001", "rank_00002", "rank_00003"),
            *("not in this checkpoint", "committed it without them", "--weights-only"),
        ],
    ),
    "no optimizer at all": (
        remove_optimizers,
        ["4 of 4 ranks have no optimizer tensors", "where Megatron chains optimizers"],
    ),
    "no rank directories": (
        remove_directories("rank_*"),
        ["of DLRover is missing too"],
    ),
    "weights missing": (
        remove_directories("mp_rank_*"),
        ["no mp_rank_*/model_optim_rng.pt", "committed it without the weights"],
    ),
    "weights of one rank missing": (
        remove_directories("mp_rank_01"),
        ["no model_optim_rng.pt in", "mp_rank_01"],
    ),
    "optimizer of one rank of another save": (
        older("rank_00002"),
        [
            "tp 0, pp 0",
            "the masters in rank_00002 do not round",
            "mp_rank_00",
            "files of two saves",
        ],
    ),
    "optimizer of all ranks of another save": (
        older("rank_00000", "rank_00001", "rank_00002", "rank_00003"),
        ["the masters in rank_00000, rank_00002 do not round", "files of two saves"],
    ),
    "weights of one rank of another save": (
        older("mp_rank_01"),
        ["holds files of another save: mp_rank_01 of iteration 2"],
    ),
    "ranks exchanged": (exchange, ["the sizes of its shards do not follow from the args"]),
    "a rank of a larger job": (
        one_rank_more,
        ["4 ranks, but the checkpoint also has rank_00004", "files of two saves"],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_incomplete_or_mixed_dlrover_commit_is_refused_with_the_files(
    broken: Path, name: str
) -> None:
    damage, facts = DAMAGE[name]
    damage(broken / NEWEST)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(broken, None, Options())
    for fact in facts:
        assert fact in str(caught.value)
    assert len(str(caught.value)) < 800
    # The previous iteration is complete; so are the weights if only optimizer state is damaged.
    assert open_source(broken, 2, Options()).contents.iteration == 2
    if "--weights-only" in str(caught.value):
        weights = open_source(broken, None, Options(weights_only=True)).contents
        assert {tensor.kind for tensor in weights.tensors} == {"weight"}


def test_commands_name_the_dlrover_format_and_an_iteration_without_files(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*command: object) -> str:
        assert commands.main(list(map(str, command))) == 1
        return capsys.readouterr().err.replace("\n", "")

    def listed() -> str:
        assert commands.main(["ls", str(broken)]) == 0
        return capsys.readouterr().out

    output = listed()
    assert output.count("DLRover's") == output.count("'flashckpt convert' reads it") == 2
    assert "Megatron's own" not in output
    for command in ("inspect", "verify"):
        error = error_of(command, broken)
        assert f"{NEWEST}: is in DLRover's format, which neither Megatron nor" in error
        assert f"flashckpt convert {broken} DST --to flashckpt --iteration 4" in error
    shutil.rmtree(broken / NEWEST)
    convert_it = ("convert", broken, tmp_path / "destination", "--to", "flashckpt")
    for words in (convert_it, ("inspect", broken), ("verify", broken)):
        error = error_of(*words)
        assert f"{NEWEST}: DLRover committed this iteration without any file; resume from" in error
        assert "(available: 2)" in error
    assert not (tmp_path / "destination").exists()
    assert "committed without any file" in listed()


def test_a_model_that_cannot_be_rebuilt_is_refused_with_a_remedy(broken: Path) -> None:
    def change(**changes: Any) -> str:
        change_states(broken / NEWEST, lambda state: vars(state["args"]).update(changes))
        with pytest.raises(FlashCkptError) as caught:
            open_source(broken, None, Options())
        assert isinstance(caught.value, UnsupportedError)
        assert len(str(caught.value)) < 800
        return str(caught.value)

    message = change(num_layers=4)
    assert "layers.2.input_norm.weight is missing, expected (16,) by the args" in message
    assert "more" in message
    assert "load it with DLRover in a job of the Megatron that wrote it" in message
    assert "--transformer-impl transformer_engine" in change(transformer_impl="transformer_engine")
