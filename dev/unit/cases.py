"""Runs the cases of the tests in Python beside it: one line each, `N passed, N failed, N skipped` last."""

import sys
import tempfile
import time
import traceback


def run_cases(functions, case=None, missing=None, among="test_"):
    """Calls those of `functions`, a module's globals, that are named test_..., with case(a temporary folder) where there
    is a `case`, and returns the exit status. A case returns None, a note that is printed, or "skipped: ..."; when
    `missing` says what is not there, all whose names begin with `among` are skipped. In the command line, -k SUBSTRING
    picks; where it picks none, the status is 1."""
    if sys.argv[1:] and (len(sys.argv) != 3 or sys.argv[1] != "-k"):
        print(f"{sys.argv[0]}: {' '.join(sys.argv[1:])} is not known here; type -k SUBSTRING or nothing", file=sys.stderr)
        return 2
    picked = sys.argv[2] if sys.argv[1:] else ""
    passed = failed = skipped = 0
    for name, run in list(functions.items()):
        if not name.startswith("test_") or picked not in name or not callable(run):
            continue
        started, note = time.time(), f"skipped: {missing}"
        if not missing or not name.startswith(among):
            try:
                with tempfile.TemporaryDirectory() as folder:
                    note = (run(case(folder)) if case else run()) or "ok"
            except (Exception, SystemExit):  # an assertion, or whatever else went wrong in the case
                traceback.print_exc(file=sys.stdout)
                note = "FAILED"
        failed += note == "FAILED"
        skipped += note.startswith("skipped: ")
        passed += note != "FAILED" and not note.startswith("skipped: ")
        print(f"{name[5:]:48} {note} ({time.time() - started:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed > 0 or passed + skipped == 0
