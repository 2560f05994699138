"""Exit codes of forked processes that several threads watch."""

from __future__ import annotations

import os
import threading

from tests.support.forked.nursery import nursery


def _end(status: int) -> None:
    os._exit(status)


def test_every_thread_reads_the_exit_code_that_the_process_had() -> None:
    processes = nursery()
    for _ in range(20):
        process = processes.Process(target=_end, args=(3,))
        process.start()
        gate = threading.Barrier(8)
        codes: list[int | None] = []

        def watch(process=process, gate=gate, codes=codes) -> None:  # type: ignore[no-untyped-def]
            gate.wait()
            while process._popen.poll() is None:
                pass
            codes.append(process.exitcode)

        threads = [threading.Thread(target=watch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        process.join()
        assert codes == [3] * 8
        assert process.exitcode == 3
        process.close()
