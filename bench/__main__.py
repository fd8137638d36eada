"""`python -m bench COMMAND`: runs one of the benchmarks, or reads their files.

Exit codes: 0 all well; 1 a result was wrong (or, where asked for, slower); 2 bad input, said in one sentence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import append, attention, block, compare, decode, generate, memory, model, plot, table
from bench.common import BenchError

COMMANDS = {
    "attention": attention,
    "block": block,
    "model": model,
    "decode": decode,
    "append": append,
    "generate": generate,
    "memory": memory,
    "compare": compare,
    "plot": plot,
    "table": table,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n\n")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except BenchError as error:
        print(f"bench {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
