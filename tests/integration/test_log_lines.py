"""Output that users scrape: log lines, timers, progress.txt, hooks and curves equal stock's.

The same jobs run with Megatron's own functions and with ours; this module lists every difference.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.integration.flag_runs import DIST, ENTRY_POINTS, EVERY_2, Job, JobResult, Runs, run_jobs

FLAGS = f"{DIST} --use-distributed-optimizer --log-progress"
ASYNC = f"{FLAGS} --async-save --use-persistent-ckpt-worker --async-strategy mcore"
JOBS = [
    Job("whole", f"{FLAGS} {EVERY_2}"),
    Job("resumed", f"{FLAGS} --save {{save}} --save-interval 4 --load {{save}}", ("whole", 2)),
    Job("tuned", f"{FLAGS} --load {{whole}} --finetune"),
    Job("pretrained", f"{FLAGS} --load {{save}}/no --pretrained-checkpoint {{whole}}"),
    Job("async", f"{ASYNC} {EVERY_2}"),
]

#: Lines of stock about its own checkpoint format.
ONLY_STOCK = {
    "Storing distributed optimizer sharded state of type dp_reshardable",
    "sharded_state_dict metadata loaded from the checkpoint: ...",
    "[time] saving checkpoint at iteration N to SAVE in torch_dist format",
    # Stock prints this line when it waits for a save; ours may be committed by then.
    "Unfinalized async checkpoint saves. Finalizing them synchronously now.",
}
#: Megatron's line about a save that starts while another one is under way. It depends on timing and
#: occurs with `--async-save` only.
OVERLAPPING = (
    "WARNING: Starting a checkpoint save before previous has finished. Consider increasing the "
    "checkpoint interval."
)
#: Lines that we add; all but the first begin with our name.
ONLY_OURS = {
    "[time] saving checkpoint at iteration N to SAVE in flashckpt format",
    "flashckpt: iteration N staged, N MiB on rank N, blocked N ms as the training loop sees it, "
    "then N ms for the copies; copied at N GB/s",
    # Megatron makes the save at the end of training outside its loop.
    "flashckpt: iteration N staged, N MiB on rank N, blocked N ms in save_checkpoint, "
    "then N ms for the copies; copied at N GB/s",
    "flashckpt: iteration N durable after N s",
    "flashckpt: iteration N was restored from storage: ...",
    "flashckpt: N, through the launcher; megatron-core N, torch Ncpu",
    "flashckpt: saves to SAVE every N iterations; kept: all; redundancy: none",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_jobs(tmp_path_factory.mktemp("lines"), JOBS, ranks=1)


def plain(text: str, run: JobResult) -> str:
    """Return `text` without parts that differ from run to run: times, numbers and paths."""
    root = str(run.save.parent)
    text = re.sub(rf"{re.escape(root)}/[\w-]+", "SAVE", text)
    text = re.sub(r"\[\d{4}-\d\d-\d\d [\d:.]+\]", "[time]", text)
    text = re.sub(r"(metadata loaded from the checkpoint|restored from \w+): .*", r"\1: ...", text)
    return re.sub(r"(?<![\w.])-?\d[\d.e+-]*", "N", re.sub(" +", " ", text)).strip()


def lines(run: JobResult) -> set[str]:
    logged = (line for line in run.output.splitlines() if not re.search("memory|get_start", line))
    return {plain(line, run) for line in logged if re.search("checkpoint|flashckpt", line)}


@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_log_lines_equal_those_of_stock(runs: Runs, name: str) -> None:
    stock, ours = (lines(runs[name][entry_point]) for entry_point in ENTRY_POINTS)
    overlapping = {OVERLAPPING} if name == "async" else set()
    assert stock - ours <= ONLY_STOCK | overlapping
    assert {line for line in ours - stock if "agent" not in line} <= ONLY_OURS | overlapping


def test_the_log_has_the_usual_lines(runs: Runs) -> None:
    """Check lines word for word, as the comparison above misses a line that both jobs lack."""
    logged = lines(runs["whole"]["ours"]) | lines(runs["resumed"]["ours"])
    assert {
        "[time] successfully saved checkpoint from iteration N to SAVE [ t N/N, p N/N ]",
        "loading distributed checkpoint from SAVE at iteration N",
        "checkpoint version N",
        "successfully loaded checkpoint from SAVE [ t N/N, p N/N ] at iteration N",
    } <= logged
    assert "[time] scheduled an async checkpoint save at iteration N to SAVE" in lines(
        runs["async"]["ours"]
    )
    output = runs["whole"]["ours"].output
    assert re.findall(r"successfully saved checkpoint from iteration +(\d)", output) == ["2", "4"]


@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_timers_have_the_names_of_stock(runs: Runs, name: str) -> None:
    def timers(run: JobResult) -> Counter[str]:
        return Counter(re.findall(r"^ +([\w/-]+) \.+:", run.logged, re.MULTILINE))

    stock, ours = (timers(runs[name][entry_point]) for entry_point in ENTRY_POINTS)
    assert ours == stock
    expected = {"whole": "save-checkpoint", "resumed": "load-checkpoint"}.get(name)
    assert expected is None or stock[expected] > 0


@pytest.mark.parametrize("name", ["resumed", "async"])
def test_progress_txt_has_the_same_lines(runs: Runs, name: str) -> None:
    def progress(run: JobResult) -> Counter[str]:
        text = (run.save / "progress.txt").read_text()
        return Counter(
            re.sub(r"throughput: \S+", "throughput: N", "\t".join(line.split("\t")[2:]))
            for line in text.splitlines()
        )

    stock, ours = (progress(runs[name][entry_point]) for entry_point in ENTRY_POINTS)
    assert ours == stock
    assert any("Iteration: 4" in line for line in stock)


@pytest.mark.parametrize("name", [job.name for job in JOBS])
def test_hooks_get_the_same_calls_as_in_stock(runs: Runs, name: str) -> None:
    def hooks(run: JobResult) -> Counter[str]:
        return Counter(plain(str(call), run) for call in run.hooks)

    stock, ours = (hooks(runs[name][entry_point]) for entry_point in ENTRY_POINTS)
    assert ours == stock
    wandb = [call for call in runs[name]["ours"].hooks if call[0].startswith("wandb_utils.on_save")]
    iterations = [arguments[-1] for _, arguments, _ in wandb]
    assert iterations == sorted(iterations), "the newest artifact must come last"


def test_curves_are_those_of_stock_plus_ours(runs: Runs) -> None:
    stock, ours = (set(runs["whole"][entry_point].scalars) for entry_point in ENTRY_POINTS)
    assert "lm loss" in stock
    assert stock <= ours
    assert ours - stock
    assert all(name.startswith("checkpoint/") for name in ours - stock)
