"""`flashckpt plan`: refusals of unsupported jobs, and notes on omitted state."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.history import append
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.megatron_lm import job_flags
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support import terminal
from tests.support.histories import history

PLAN = ["plan", "--gpus", "8", "--parameters", "8e9"]
FP8 = "--bf16 --use-distributed-optimizer --fp8-format hybrid --fp8-param-gather"
AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"


def run(
    capsys: pytest.CaptureFixture[str], words: str, *options: str
) -> tuple[int, str, list[str]]:
    status = main([*PLAN, *options, "--", *words.split()])
    printed = capsys.readouterr()
    return status, printed.out, printed.err.splitlines()


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (f"{AWARE} --exp-avg-dtype fp8", ["--exp-avg-dtype fp8 keeps states with scales"]),
        (
            f"{AWARE} --exp-avg-sq-dtype=fp16 --main-params-dtype fp16",
            ["--main-params-dtype fp16 keeps", "--exp-avg-sq-dtype fp16 keeps"],
        ),
        ("--optimizer soap", ["--optimizer soap keeps states that are not saved; use one of adam"]),
        (f"{FP8} --no-save-optim", ["--fp8-param-gather needs the masters", "--no-save-optim"]),
        (f"{FP8} --finetune --no-load-optim", ["without --finetune", "without --no-load-optim"]),
        (
            f"{FP8} {AWARE} --optimizer-cpu-offload",
            ["without --optimizer-cpu-offload", "without --use-precision-aware-optimizer"],
        ),
        ("--fp4-param-gather --no-save-optim", ["--fp4-param-gather needs the masters"]),
        ("--num-experts 8 --moe-use-legacy-grouped-gemm", ["experts transposed"]),
        ("--num-experts 8 --use-legacy-models", ["--use-legacy-models has experts"]),
        *(
            (f"{flag} 8", [f"with {flag} Megatron's own functions save and load"])
            for flag, _ in job_flags._LEFT_TO_MEGATRON.values()
        ),
    ],
)
def test_an_unsupported_job_gets_all_reasons_and_no_figures(
    capsys: pytest.CaptureFixture[str], words: str, reasons: list[str]
) -> None:
    for output in ([], ["--json"]):
        status, out, err = run(capsys, words, *output)
        assert (status, out, len(err)) == (1, "", 1)
        assert err[0].startswith("flashckpt: no figures, because flashckpt does not serve this job")
        for reason in reasons:
            assert reason in err[0]
    # Missing sizes are of no interest then.
    assert main(["plan", "--gpus", "8", "--", *words.split()]) == 1
    assert capsys.readouterr().err.splitlines() == err


def test_a_narrow_terminal_gets_one_line_per_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.pretend(monkeypatch, 80)
    words = ["plan", "--gpus", "64", "--parameters", "70e9", "--host-memory-gb", "64"]
    assert main([*words, "--", "--bf16", "--use-distributed-optimizer"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (start,) = (n for n, line in enumerate(lines) if line.startswith("save "))
    table = [*lines[start : start + 4], *lines[-6:]]
    firsts = [line.split("  ")[0].strip() for line in table if line]
    assert firsts[1:4] == ["flashckpt", "stock async", "gather"]
    assert [line.split()[0] for line in lines[-6:]] == ["GPUs", "16", "32", "64", "128", "256"]
    assert all(len(line) <= 80 for line in table)


@pytest.mark.parametrize(
    "words",
    [
        AWARE + " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "--bf16 --fp8-format hybrid",
        "--exp-avg-dtype fp8",  # ignored by optimizers that are not precision-aware
        "--use-legacy-models",
        "--optimizer lion",
    ],
)
def test_a_supported_job_gets_figures_without_notes(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    status, out, err = run(capsys, words)
    assert (status, err) == (0, [])
    assert "8.000 billion" in out


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (FP8, "--fp8-param-gather: FP8 and FP4 weights are not saved"),
        (f"{FP8} {AWARE} --fp8-recipe mxfp8", "--fp8-param-gather: FP8 and FP4 weights"),
        ("--optimizer dist_muon", "--optimizer dist_muon: keeps one state of matrices"),
        ("--num-distributed-optimizer-instances 2", "up to 2 times as much"),
    ],
)
def test_a_note_names_the_state_that_figures_omit(
    capsys: pytest.CaptureFixture[str], words: str, note: str
) -> None:
    status, _, err = run(capsys, words)
    assert (status, len(err)) == (0, 1)
    assert err[0].startswith("flashckpt: note: ")
    assert note in err[0]
    status, out, err = run(capsys, words, "--json")
    assert (status, err) == (0, [])
    assert note in json.loads(out)["notes"][0]


def test_saves_that_copy_everything_first_block_for_the_time_of_the_copy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocked = {}
    for words in ("", "--offload-optimizer-states"):
        _, out, _ = run(capsys, words, "--json")
        figures = json.loads(out)
        blocked[words] = figures["plan"]["ours"]["blocked_s"]
    assert "--offload-optimizer-states: each save blocks training" in figures["notes"][0]
    copied_s = figures["plan"]["stage_s"]
    assert blocked["--offload-optimizer-states"] == pytest.approx(blocked[""] + copied_s)


def test_a_plan_says_what_it_assumes_and_what_a_day_of_checkpoints_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--gpus", "1024", "--parameters", "70b"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "assumed weights in fp32, because '--' is followed by neither --bf16 nor --fp16" in out
    assert "12 bytes per parameter, divided equally over the ranks" in out
    assert "parameters 70.000 billion" in out
    assert re.search(r"Keep a few of these \d+ checkpoints a day: 'retention: {latest: 3}'", out)
    main(["plan", "--gpus", "1024", "--parameters", "70B", "--", "--bf16"])
    out = " ".join(capsys.readouterr().out.split())
    assert "fp32, because" not in out
    assert "14 bytes per parameter" in out
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16"
    main(["plan", "--gpus", "8", "--", *model.split()])
    assert "assumed" not in capsys.readouterr().out


def test_figures_are_taken_from_the_history_of_a_job_unless_they_are_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for event in history(3):
        append(PosixStore(tmp_path), event)
    options = ["--measured", str(tmp_path), "--json"]
    status, out, _ = run(capsys, "--bf16", *options, "--blocked-s", "0.5")
    cluster = json.loads(out)["cluster"]
    assert status == 0
    assert (cluster["iteration_s"], cluster["blocked_s"]) == (2.0, 0.5)
    assert (cluster["storage_gb_s"], cluster["node_storage_gb_s"]) == (1.6, 0.8), "two nodes"
    assert cluster["gpu_mtbf_h"] == pytest.approx(16 * 4 * 310 / 3 / 3600)
    empty = tmp_path / "empty"
    empty.mkdir()
    status, _, errors = run(capsys, "--bf16", "--measured", str(empty))
    assert status == 1
    assert f"{empty}: no run has two committed saves in its history" in errors[0]


STORED = "--bf16 --use-distributed-optimizer --save s3://bucket/job"


def test_a_job_that_saves_to_a_bucket_gets_requests_and_their_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "object store" not in run(capsys, STORED.replace("s3://bucket", "/ckpt"))[1]
    status, out, err = run(capsys, STORED)
    assert (status, err) == (0, [])
    (line,) = (line for line in out.splitlines() if line.startswith("object store: "))
    assert re.fullmatch(
        r"object store: at most [\d,]+ writes and [\d,]+ reads per save, .* per save and node, .* "
        r"per day; requests cost \$[\d,.]+ per day, .* per day are sent, and one checkpoint costs "
        r"\$[\d.,]+ per month for which it is kept",
        line,
    )
    use, free = (
        json.loads(run(capsys, STORED, "--json", *options)[1])["store"]
        for options in ([], ["--usd-per-1000-writes", "0", "--usd-per-1000-reads", "0"])
    )
    # Each of 8 ranks stores 1e9 parameters of 14 bytes, in parts of 8 MiB.
    assert use["per_save"]["writes"] >= 8 * (14e9 / 2**23)
    assert use["usd_per_day"] > 0
    assert (free["usd_per_day"], free["per_day"]) == (0, use["per_day"])
    status, _, err = run(capsys, STORED, "--usd-per-gb-month", "-1")
    assert status == 2
    assert err == ["flashckpt: --usd-per-gb-month: -1 is not a price; give 0 or more"]
