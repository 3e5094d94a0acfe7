"""How a command ends when nobody reads what it says."""

import os
import subprocess
import sys


def test_a_closed_stdout_changes_neither_status_nor_stderr():
    command = [sys.executable, "-m", "rlhf.cli", "doctor", "--json"]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    reader, writer = os.pipe()
    os.close(reader)
    unread = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert read.stdout
    assert (unread.returncode, unread.stderr) == (read.returncode, read.stderr)
