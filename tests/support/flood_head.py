"""The head's side of the control plane in its own process, whose memory a test measures. It acknowledges reports.

python tests/support/flood_head.py RUN LARGEST
"""

import logging
import sys
from pathlib import Path

from hpc_es.paths import RunPaths
from hpc_es.transport.control import HeadServer
from hpc_es.transport.messages import Ack, Report


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    server = HeadServer(RunPaths(Path(sys.argv[1])), 1, "run", "127.0.0.1", largest=int(sys.argv[2]))
    while True:
        for peer, envelope in server.receive(1.0):
            if isinstance(envelope.message, Report):
                server.send(peer, Ack(envelope.message.result.eval_id))


if __name__ == "__main__":
    main()
