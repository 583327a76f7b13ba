"""Imported by a fork server before all else: sets its title, and has it ignore Ctrl-C, also as it imports."""

import signal

from rolecall import machine

signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the supervisor ends this process
machine.name_part("fork-server")
