"""The log of the server: records of other processes, and the signal that ended a rank."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from para_core.fleet.last_words import Notes, describe_death
from para_core.fleet.log_relay import LogEntry, LogRelay, log_entries

CHILD = """
import signal, time
from para_core.fleet.last_words import LastWords

# The child of a process that ignores a signal, as one under nohup ignores SIGHUP, ignores it too.
for name in ("SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
words = LastWords()
print(words.folder, flush=True)
time.sleep(60)
"""
ENDING = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGHUP")
VANISHED = (
    "The actor died.\nWorker exit type: SYSTEM_ERROR Worker exit detail: connection error code 2. End of file. {}"
)
HINT = "Some common causes include: (3) the worker crashed unexpectedly due to SIGSEGV"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "handler"),
    [
        *((name, "signal.SIG_DFL") for name in ENDING),
        # A signal that does not end a process leaves no note.
        *(("SIGKILL", handler) for handler in ("signal.SIG_IGN", "lambda *_: None")),
    ],
)
def test_signal_that_ended_a_process_is_known(name, handler):
    child = CHILD.replace("signal.SIG_DFL", handler)
    if handler != "signal.SIG_DFL":
        survive = "signal.raise_signal(signal.SIGHUP)\nprint('lives', flush=True)\n"
        child = child.replace("time.sleep", f"{survive}time.sleep")
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        notes = Notes(folder)
        assert not Path(folder).exists()
        assert handler == "signal.SIG_DFL" or process.stdout.readline() == "lives\n"
        assert notes.read_signal() == ""
        process.send_signal(getattr(signal, name))
        assert process.wait(30) == -getattr(signal, name)
    assert describe_death(VANISHED.format(HINT), notes) == name
    notes.close()


def test_rank_without_notes(tmp_path):
    deaths = {
        VANISHED.format(HINT): "a signal, most likely SIGKILL",
        "Worker exit detail: Worker exits with an exit code 1. The process receives a SIGTERM.": "SIGTERM",
        "Worker exit detail: Worker exits with an exit code 7.": "exit code 7",
        "\n The node died.\nmore": "The node died.",
        "": "for an unknown reason",
    }
    assert {message: describe_death(message, None) for message in deaths} == deaths
    notes = Notes(str(tmp_path / "on another node"))
    assert (notes.readable, notes.read_signal()) == (False, "")


def test_records_arrive_once_although_an_answer_is_lost(caplog):
    relay, logger = LogRelay(), logging.getLogger("para_core.fleet.test")
    caplog.set_level(logging.INFO, "para_core")

    def log(relay, level, text, *args):
        relay.handle(logger.makeRecord(logger.name, level, "", 0, text, args, None))

    log(relay, logging.INFO, "not a number: %d", "x")
    log(relay, logging.INFO, "first %d", 1)
    relay.read(0)  # this answer is lost
    position, entries = relay.read(0)
    assert [entry[1:] for entry in entries] == [(logging.INFO, "para_core.fleet.test", "first 1")]
    log(relay, logging.ERROR, "second")
    position, entries = relay.read(position)
    assert [entry.message for entry in entries] == ["second"]
    assert relay.read(position)[1] == []
    # Entries are logged with their own time.
    shown, hidden = (logging.ERROR, "para_core.a", "100 %s"), (logging.DEBUG, "para_core.b", "no")
    log_entries([LogEntry(5.25, *shown), LogEntry(6.0, *hidden)])
    (record,) = caplog.records
    assert (record.created, record.levelname, record.name) == (5.25, "ERROR", "para_core.a")
    assert record.getMessage() == "100 %s"
