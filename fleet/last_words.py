"""The signal that ended a rank, which Ray does not tell: the rank leaves a note in a file that another
process reads.

A process that SIGKILL ends can leave none. So if a rank vanished without a note, it was SIGKILL.

`rank_actor.py` makes :class:`LastWords` in the process of the rank, and `group.py` reads the notes. Ranks
that are processes of this host need no notes: the launcher gets their exit status. Tests:
tests/fleet/test_events.py.
"""

from __future__ import annotations

import faulthandler
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

# Beginnings of the line that faulthandler writes for the signals of a crash, and these signals.
_CRASH_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_CRASH_FILE = "crash"
# Other signals that end a process. Ray handles SIGTERM itself, and says so.
_OTHER_SIGNALS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
_EXIT_CODE = re.compile(r"exit code (\d+)")


class LastWords:
    """Notes that this process writes when a signal ends it.

    Attributes:
        folder: The folder with the notes. The process that makes :class:`Notes` of it removes it, or on
            another node, where it cannot, lets this process call :meth:`remove_folder`.
    """

    def __init__(self) -> None:
        # All files exist before Notes lists the folder, which it does once.
        self.folder = tempfile.mkdtemp(prefix="para_core_rank_")
        # The files stay open until the process ends, because a signal handler cannot open any.
        self._files: list[Any] = [
            (Path(self.folder) / name).open("w") for name in (_CRASH_FILE, *_OTHER_SIGNALS)
        ]
        faulthandler.enable(self._files[0], all_threads=False)
        for name, file in zip(_OTHER_SIGNALS, self._files[1:], strict=True):
            number = getattr(signal, name)
            # A signal that is ignored, as SIGHUP is under nohup, or handled in Python does not end the
            # process: a note of it would be taken for the reason of a later end.
            if signal.getsignal(number) == signal.SIG_DFL:
                # With chain, what the signal did before follows: it ends the process.
                faulthandler.register(number, file, all_threads=False, chain=True)

    def remove_folder(self) -> None:
        """Remove the folder. The files stay open, so that a signal handler can still write."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Notes:
    """The notes of another process in ``folder``, which is removed: only the open files keep them.

    Attributes:
        readable: Whether this process sees the folder. If not, the rank is on another node, no note is ever
            read, and the absence of a note does not mean SIGKILL.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        self.readable = path.is_dir()
        self._files: dict[str, Any] = {}
        if self.readable:
            self._files = {file.name: file.open(errors="replace") for file in path.iterdir()}
        shutil.rmtree(path, ignore_errors=True)

    def read_signal(self) -> str:
        """Return the name of the signal that the process noted, an empty string if it noted none."""
        for name, file in self._files.items():
            file.seek(0)
            text = file.read()
            if text and name != _CRASH_FILE:
                return name
            for beginning, crash in _CRASH_SIGNALS.items():
                if beginning in text:
                    return crash
        return ""

    def close(self) -> None:
        """Close the files, by which the notes are gone."""
        for file in self._files.values():
            file.close()
        self._files = {}


def describe_death(message: str, notes: Notes | None) -> str:
    """Return how a rank ended: the name of a signal, an exit code, or the first line of Ray's ``message``
    about it.

    ``notes`` are those of the rank, None if it had made none yet.
    """
    if notes is not None:
        noted = notes.read_signal()
        if noted:
            return noted
    if "SIGTERM" in message.partition("exit detail")[2]:
        return "SIGTERM"
    code = _EXIT_CODE.search(message)
    if code is not None:
        return f"exit code {code[1]}"
    if "End of file" in message:
        if notes is not None and notes.readable:
            return "SIGKILL"
        return "a signal, most likely SIGKILL"
    return next((line.strip() for line in message.splitlines() if line.strip()), "for an unknown reason")
