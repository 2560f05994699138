"""Reviewed reasons for every call that removes, truncates or renames: see `test_removals.py`.

Each entry has function, call, reason, and the test that shows that the call hits nothing else.
"""

# ruff: noqa: E501, names of tests are long

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    module: str
    function: str
    call: str
    """The call in the form that `ast.unparse` returns."""


class Reason(NamedTuple):
    why: str
    test: str
    """`file::function` below tests/. That test fails if the call removes files of other programs."""


def review(module: str, *lines: tuple[str, str, str, str]) -> dict[Call, Reason]:
    """Return a module's reviewed calls; each line has function, call, reason and test."""
    return {Call(module, where, call): Reason(why, test) for where, call, why, test in lines}


#: Reasons that apply to several calls.
PRIVATE = "in the agent's directory, which no other user can enter, and under a name of ours"
EMPTY = "rmdir(2) removes empty directories only"
ID = "the name carries the random id of the save"
RANDOM = "the name is random and was made by this call"
FRESH = "in a directory that this conversion made under a random name"
FENCED = "agent/test_fence.py::test_an_overtaken_agent_changes_no_file_in_storage"
CALLER = "a name inside the root, through no link; the callers choose it and are in this table"

REVIEWED: dict[Call, Reason] = {
    **review(
        "agent.process",
        (
            "_lower_session",
            "(_SELF / 'autogroup').write_text(f'{min(nice, 19)}')",
            "a setting of the kernel, not a file; that of the agent's own session",
            "agent/test_process.py::test_a_foreground_agent_does_not_lower_a_session_that_it_shares",
        ),
        (
            "_spare_from_oom",
            "file.write_text(f'{attempt}')",
            "a setting of the kernel for this process, not a file",
            "agent/test_process.py::test_an_oom_score_becomes_the_lowest_allowed_and_is_never_raised",
        ),
    ),
    **review(
        "agent.socket_dir",
        (
            "_entered",
            "entry.unlink()",
            "a link in a base that no other user can enter, which leads nowhere",
            "agent/test_places.py::test_processes_find_another_place_when_the_session_has_ended",
        ),
        (
            "_shared_base",
            "made.rmdir()",
            EMPTY,
            "agent/test_places.py::test_simultaneous_processes_agree_on_a_place_if_the_name_is_taken",
        ),
        (
            "directory_of",
            "place.rmdir()",
            EMPTY,
            "agent/test_places.py::test_simultaneous_processes_agree_on_a_place_if_the_name_is_taken",
        ),
        (
            "leave",
            "directory.rmdir()",
            EMPTY,
            "agent/test_survival.py::test_an_agent_with_an_error_leaves_its_log_behind",
        ),
        (
            "leave",
            "entry.unlink()",
            "a link to the directory that was just removed",
            "agent/test_places.py::test_an_agent_moves_with_its_memory_when_its_session_ends",
        ),
    ),
    **review(
        "agent.incarnations",
        (
            "SecondStarts.write",
            "draft.write_bytes(msgspec.json.encode(entries))",
            PRIVATE,
            "agent/test_second_start.py::test_the_file_of_second_starts_is_removed_with_the_job",
        ),
        (
            "SecondStarts.write",
            "draft.replace(path)",
            PRIVATE,
            "agent/test_second_start.py::test_the_file_of_second_starts_is_removed_with_the_job",
        ),
    ),
    **review(
        "agent.upkeep",
        (
            "Upkeep.listen",
            "os.ftruncate(self._lock, 0)",
            "the lock that this process holds; it only names its holder",
            "agent/test_upkeep.py::test_an_agent_whose_place_was_taken_leaves_the_place_to_the_other",
        ),
        (
            "Upkeep.listen",
            "path.unlink(missing_ok=True)",
            PRIVATE,
            "agent/test_client.py::test_the_next_connect_replaces_a_killed_agent",
        ),
        (
            "Upkeep._restore_log",
            "os.open(self.directory / LOG, flags, 384)",
            "opened to append",
            "agent/test_upkeep.py::test_an_agent_restores_removed_files_at_once_and_keeps_its_memory",
        ),
        (
            "Upkeep.leave",
            "(self.directory / SOCKET).unlink(missing_ok=True)",
            PRIVATE,
            "agent/test_upkeep.py::test_an_agent_whose_place_was_taken_leaves_the_place_to_the_other",
        ),
        (
            "Upkeep.leave",
            "(self.directory / SECOND_STARTS).unlink(missing_ok=True)",
            PRIVATE,
            "agent/test_upkeep.py::test_an_agent_whose_place_was_taken_leaves_the_place_to_the_other",
        ),
        (
            "Upkeep.leave",
            "(self.directory / LOG).unlink(missing_ok=True)",
            PRIVATE,
            "agent/test_survival.py::test_an_agent_with_an_error_leaves_its_log_behind",
        ),
        (
            "Upkeep.leave",
            "(self.directory / LOCK).unlink(missing_ok=True)",
            PRIVATE,
            "agent/test_upkeep.py::test_an_agent_whose_place_was_taken_leaves_the_place_to_the_other",
        ),
    ),
    **review(
        "agent.commit",
        (
            "_make_durable",
            "save.storage.put(common, save.storage.read(common))",
            ID,
            "agent/test_power.py::test_a_manifest_is_durable_before_another_attempt_moves_the_tracker",
        ),
        (
            "_publish",
            "storage.put(file_names.TRACKER, str(save.iteration).encode(), guard=lambda: _check_named(save))",
            "Megatron's tracker, whose only contents are the iteration; a link is replaced, not followed",
            "agent/test_commit.py::test_an_older_save_that_ends_last_leaves_tracker_and_newer_checkpoint",
        ),
        (
            "commit",
            "storage.put(common, meta.common, durable='contents')",
            ID,
            "agent/test_commit.py::test_a_repeated_save_replaces_the_committed_attempt_only_by_its_commit",
        ),
        (
            "commit",
            "storage.put(f'{save.directory}/{file_names.MANIFEST}', encoded, guard=lambda: _check_wanted(save))",
            "the manifest of an iteration directory is ours, whole or damaged; its successor names the same iteration",
            "agent/test_commit.py::test_an_older_attempt_that_ends_last_does_not_replace_the_newer_one",
        ),
    ),
    **review(
        "agent.failed_save",
        (
            "forget.delete",
            "save.storage.delete(f'{save.directory}/{name}')",
            ID,
            "agent/test_commit.py::test_a_failed_attempt_leaves_the_committed_one_of_its_iteration",
        ),
        (
            "forget",
            "save.storage.delete_directory(save.directory)",
            EMPTY,
            "agent/test_commit.py::test_a_failed_attempt_leaves_the_committed_one_of_its_iteration",
        ),
        (
            "keep_telling.tell",
            "save.storage.put(name, reason.encode())",
            ID,
            "agent/test_failures.py::test_a_failure_on_one_node_reaches_the_other_with_its_reason",
        ),
        (
            "leave_note",
            "storage.put(name, reason.encode())",
            ID,
            "agent/test_failures.py::test_a_failure_on_one_node_reaches_the_other_with_its_reason",
        ),
    ),
    **review(
        "agent.claim",
        (
            "put",
            "storage.put(CLAIM, encode(claim), guard=guard)",
            "a name of ours; see who calls it",
            "agent/test_takeover.py::test_a_refused_start_names_the_writer_and_changes_nothing",
        ),
    ),
    **review(
        "agent.fence",
        *(
            (f"FencedStorage.{method}", f"self._storage.{call}", CALLER, FENCED)
            for method, call in (
                ("put", "put(name, data, durable, check)"),
                ("create", "create(name, nbytes)"),
                ("delete", "delete(name)"),
                ("delete_directory", "delete_directory(name)"),
                ("move", "move(name, to)"),
            )
        ),
    ),
    **review(
        "agent.keeper",
        (
            "ClaimKeeper._renew",
            "claims.put(storage, self._renewed(self._own, state))",
            "the claim that somebody has removed, in the directory that this run has claimed",
            "agent/test_fence.py::test_an_agent_puts_a_removed_claim_again",
        ),
    ),
    **review(
        "agent.takeover",
        (
            "take",
            "claims.put(storage, new_claim, check)",
            "the claim of a run that has ended or is to be overtaken: see `_await_end`",
            "agent/test_takeover.py::test_a_refused_start_names_the_writer_and_changes_nothing",
        ),
    ),
    **review(
        "catalog.history",
        (
            "append",
            "storage.put(HISTORY, text, durable='contents')",
            "a name of ours; the lines that were there are in it",
            "agent/test_history.py::test_invalid_history_lines_are_skipped_and_an_unwritable_history_fails_no_save",
        ),
    ),
    **review(
        "agent.cleanup",
        (
            "_delete",
            "storage.delete(name)",
            "names of ours by pattern, of saves that nobody has under way, that never were committed; regular files",
            "agent/test_cleanup.py::test_foreign_files_stay_and_links_are_not_followed",
        ),
        (
            "_delete_directory",
            "storage.delete_directory(name)",
            EMPTY,
            "agent/test_cleanup.py::test_a_directory_without_our_files_stays_even_if_it_is_empty",
        ),
        (
            "Sweeper.sweep",
            "orphans.remove(self._storage)",
            "see `OrphanedFiles.remove`; a checkpoint always has its manifest",
            "agent/test_cleanup.py::test_a_checkpoint_whose_manifest_a_user_moved_away_is_kept",
        ),
    ),
    **review(
        "agent.markers",
        (
            "put_marker",
            "storage.put(f'{directory}/{file_names.marker_name(facts.save_id)}', encode_marker(marker_of(facts, manifest)), durable='nothing')",
            ID,
            "agent/test_markers.py::test_the_former_marker_is_removed_before_its_manifest",
        ),
        (
            "remove_markers",
            "storage.delete(f'{directory}/{name}')",
            "a name of ours by pattern; a checkpoint is whole without its marker",
            "agent/test_markers.py::test_the_former_marker_is_removed_before_its_manifest",
        ),
    ),
    **review(
        "agent.tidying",
        (
            "remove_obsolete",
            "_obsolete_files(save, pending).remove(save.storage)",
            "of `_is_of_an_attempt` or another save's id, which is not under way; see `OrphanedFiles.remove`",
            "agent/test_tidying.py::test_a_save_under_way_of_the_same_iteration_is_spared",
        ),
    ),
    **review(
        "agent.shard_writer",
        (
            "durable_shard",
            "storage.create(f'{directory}/{shard_name(meta.rank, save_id)}', nbytes)",
            ID,
            "agent/test_commit.py::test_a_repeated_save_replaces_the_committed_attempt_only_by_its_commit",
        ),
    ),
    **review(
        "agent.publication",
        (
            "put_records",
            "storage.put(f'{iteration_dir(first.iteration)}/{name}', encode_records(records), durable='nothing')",
            ID,
            "agent/test_commit.py::test_a_record_of_an_earlier_attempt_does_not_count",
        ),
    ),
    **review(
        "catalog.retention",
        (
            "_hide",
            "storage.move(manifest, file_names.removal_name(iteration, save_id))",
            "a manifest that was decoded, of that very iteration, in a directory that is no link",
            "agent/test_retention.py::test_retention_spares_newer_uncommitted_linked_foreign_and_megatron_files",
        ),
        (
            "_clear.delete",
            "storage.delete(path)",
            "regular files that carry the id of the save to be removed; others are named in the log",
            "agent/test_retention.py::test_retention_spares_newer_uncommitted_linked_foreign_and_megatron_files",
        ),
        (
            "_clear",
            "storage.delete_directory(directory)",
            EMPTY,
            "agent/test_retention.py::test_retention_spares_newer_uncommitted_linked_foreign_and_megatron_files",
        ),
        (
            "_clear",
            "storage.delete(file_names.removal_name(iteration, save_id))",
            "the manifest that `_remove` moved, by its name",
            "agent/test_retention.py::test_a_checkpoint_saved_again_survives_its_former_unfinished_removal",
        ),
    ),
    **review(
        "agent.trace_files",
        (
            "Traces._prune",
            "path.unlink(missing_ok=True)",
            "regular files with a trace's name that say that they are of this save directory",
            "agent/test_trace_files.py::test_jobs_that_share_a_trace_directory_keep_their_own_traces",
        ),
        (
            "Traces._write",
            "temporary.write_bytes(encoded)",
            RANDOM,
            "agent/test_trace_files.py::test_the_newest_traces_stay_and_foreign_files_are_left_alone",
        ),
        (
            "Traces._write",
            "os.replace(temporary, directory / name)",
            ID,
            "agent/test_trace_files.py::test_jobs_that_share_a_trace_directory_keep_their_own_traces",
        ),
        (
            "Traces._write",
            "temporary.unlink(missing_ok=True)",
            RANDOM,
            "agent/test_trace_files.py::test_the_newest_traces_stay_and_foreign_files_are_left_alone",
        ),
    ),
    **review(
        "convert.common.output_dir",
        (
            "new_directory",
            "shutil.rmtree(temporary, ignore_errors=True)",
            RANDOM,
            "convert/test_overwrite.py::test_damaged_and_interrupted_exports_do_not_block_a_new_export",
        ),
        (
            "_replace",
            "final.rename(aside)",
            "what `refuse_others` took for an earlier export; it comes back if that is no longer so",
            "convert/test_overwrite.py::test_a_file_added_to_an_export_during_its_replacement_is_kept",
        ),
        (
            "_replace",
            "aside.rename(final)",
            "gives back what was moved a moment ago",
            "convert/test_overwrite.py::test_a_file_added_to_an_export_during_its_replacement_is_kept",
        ),
        (
            "_replace",
            "fresh.rename(final)",
            "replaces nothing but an empty directory: rename(2)",
            "convert/test_overwrite.py::test_a_foreign_file_in_an_export_is_named_and_kept",
        ),
        (
            "_replace",
            "former_export.remove(aside)",
            "see `former_export.remove`",
            "convert/test_overwrite.py::test_a_file_added_to_an_export_during_its_removal_is_kept",
        ),
        (
            "save",
            "open(path, 'ab' if append else 'wb')",
            FRESH,
            "convert/test_overwrite.py::test_a_destination_that_overlaps_the_source_is_refused",
        ),
        (
            "move_tracker",
            "storage.put(TRACKER, new_text.encode())",
            "Megatron's tracker, which never goes back",
            "convert/test_ours.py::test_a_conversion_never_moves_the_tracker_back",
        ),
    ),
    **review(
        "convert.common.former_export",
        (
            "mark",
            "(directory / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(listed), indent=1))",
            FRESH,
            "convert/test_overwrite.py::test_a_new_export_replaces_an_earlier_export_of_any_format",
        ),
        (
            "remove",
            "path.unlink()",
            "files that a list of ours or a manifest names and that are as they were written",
            "convert/test_overwrite.py::test_a_file_list_with_outside_paths_removes_none_of_them",
        ),
        (
            "remove",
            "path.rmdir()",
            EMPTY,
            "convert/test_overwrite.py::test_a_file_added_to_an_export_during_its_removal_is_kept",
        ),
    ),
    **review(
        "convert.writers.safetensors",
        (
            "_write",
            "open(path, 'wb')",
            FRESH,
            "convert/test_overwrite.py::test_a_destination_that_overlaps_the_source_is_refused",
        ),
        (
            "write_safetensors",
            "(fresh / INDEX).write_bytes(encoded)",
            FRESH,
            "convert/test_overwrite.py::test_a_destination_that_overlaps_the_source_is_refused",
        ),
    ),
    **review(
        "convert.writers.torch_dist",
        (
            "_Files.finish",
            "open(self._directory / METADATA, 'wb')",
            FRESH,
            "convert/test_overwrite.py::test_a_destination_that_overlaps_the_source_is_refused",
        ),
        (
            "write_torch_dist",
            "(fresh / CONFIG).write_text(json.dumps(_FORMAT))",
            FRESH,
            "convert/test_overwrite.py::test_a_destination_that_overlaps_the_source_is_refused",
        ),
    ),
    **review(
        "memory.slab",
        (
            "Slab._allocated",
            "os.ftruncate(fd, geometry.nbytes)",
            "a memfd made in the line before, of no bytes",
            "memory/test_slab.py::test_a_new_slab_is_empty",
        ),
    ),
    **review(
        "save.probe",
        (
            "_write",
            "storage.create(draft, 2 * _HALF)",
            RANDOM,
            "save/test_probe.py::test_a_usable_directory_passes_and_stays_empty",
        ),
        (
            "_write",
            "storage.move(draft, name)",
            RANDOM,
            "save/test_probe.py::test_a_usable_directory_passes_and_stays_empty",
        ),
        (
            "_write",
            "storage.delete(draft)",
            RANDOM,
            "save/test_probe.py::test_a_refusal_names_the_operation_that_the_file_system_lacks",
        ),
        (
            "_remove",
            "storage.delete(name)",
            RANDOM,
            "save/test_probe.py::test_a_usable_directory_passes_and_stays_empty",
        ),
    ),
    **review(
        "cli.report",
        (
            "draw",
            "figure.savefig(file, format='png', dpi=100)",
            "the file that the user named, if it is a PNG already",
            "agent/test_report.py::test_a_drawing_replaces_only_png_files",
        ),
    ),
    **review(
        "storage.patient",
        *(
            (
                f"RetryingStorage.{method}",
                f"self._storage.{call}",
                CALLER,
                "storage/test_contract.py::test_delete_removes_that_file_only",
            )
            for method, call in (
                ("put", "put(name, data, durable, guard)"),
                ("create", "create(name, nbytes)"),
                ("delete", "delete(name)"),
                ("delete_directory", "delete_directory(name)"),
                ("move", "move(name, to)"),
            )
        ),
    ),
    **review(
        "storage.posix",
        (
            "PosixStorage.delete",
            "path.unlink(missing_ok=True)",
            CALLER,
            "storage/test_posix.py::test_delete_removes_a_link_and_not_its_target",
        ),
        (
            "PosixStorage.delete_directory",
            "path.rmdir()",
            EMPTY,
            "storage/test_contract.py::test_delete_directory_removes_only_an_empty_directory",
        ),
        (
            "PosixStorage.move",
            "os.rename(path, target)",
            CALLER,
            "storage/test_contract.py::test_a_moved_file_has_only_its_new_name",
        ),
        (
            "PosixStorage.put",
            "os.replace(temporary, path)",
            CALLER,
            "storage/test_posix.py::test_put_replaces_a_link_and_not_its_target",
        ),
        (
            "PosixStorage.put",
            "temporary.unlink(missing_ok=True)",
            "opened with O_EXCL by this call",
            "storage/test_posix.py::test_a_put_does_not_remove_a_file_with_its_temporary_name",
        ),
        (
            "PosixWriter.__init__",
            "os.open(path, flags, 438)",
            CALLER,
            "storage/test_posix.py::test_create_does_not_follow_a_planted_link",
        ),
        (
            "PosixWriter.abandon",
            "self._path.unlink()",
            "the file that this writer opened",
            "storage/test_contract.py::test_an_abandoned_file_leaves_nothing_behind",
        ),
        (
            "_open_nofollow",
            "os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)",
            "every caller reads",
            "storage/test_posix.py::test_read_does_not_follow_a_link",
        ),
    ),
}
