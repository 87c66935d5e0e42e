"""The launcher as a script, for a process that a zygote forked: `elaswave run ARGUMENTS`."""

import os
import sys

from elaswave_plugin.ipc.environment import JOB_SECRET_FD, SNAPSHOT_FDS
from elaswave_plugin.ipc.progress_page import PROGRESS_FD
from elaswave_plugin.launch.launch import main

if __name__ == "__main__":
    # A zygote hands these to trainers; a launcher that was started by hand has none of them.
    for name in (JOB_SECRET_FD, PROGRESS_FD, SNAPSHOT_FDS):
        for number in os.environ.pop(name).split(","):
            os.close(int(number))
    sys.exit(main(sys.argv[1:]))
