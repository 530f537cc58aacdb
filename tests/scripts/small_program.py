"""A program for the tests of ``make gpu``: does what its arguments say, in their order.

``run FILE`` adds a line to a file, ``save FILE WAY=LOSS...`` saves ways of one tensor, ``figures FILE`` saves a figure,
``wait FIFO`` waits until the writer of a FIFO closes it, ``print TEXT`` prints, and ``exit STATUS`` exits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    while words:
        what, value, *words = words
        if what == "run":
            with Path(value).open("a") as file:
                file.write("run\n")
        elif what == "save":
            import torch

            results = {}
            while words and "=" in words[0]:
                way, loss = words.pop(0).split("=")
                found = torch.tensor([float(loss)])
                results[way] = {"losses": found, "values": {"weight": found}, "peak": [8_000_000], "kernels": []}
            torch.save(results, value)
        elif what == "figures":
            figure = {"name": "step", "value": 2.0, "unit": "ms", "spread": [1, 3], "target": "<= 3", "met": True}
            Path(value).write_text(json.dumps([figure]))
        elif what == "wait":
            with Path(value).open() as file:
                file.read()
        elif what == "print":
            print(value, flush=True)
        elif what == "exit":
            sys.exit(int(value))


if __name__ == "__main__":
    main(sys.argv[1:])
