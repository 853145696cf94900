"""Read mutated files under limits of memory; one line on stdout for each case, before and after it.

    python worker.py CORPUS SCRATCH < cases     each case a line of JSON: sample and seed

An error of tensortap with a bounded text, or no error, is right. Everything else is a finding.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import resource
import shutil
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from corpus import REFERENCE, SAMPLES, readers
from mutations import mutate

from tensortap.errors import TensortapError

LONGEST_MESSAGE = 4_000
MEMORY = 3 << 30
"""Bytes of address space beyond what the libraries take."""


def main(corpus: Path, scratch: Path) -> None:
    faulthandler.enable()
    samples, read = {sample.name: sample for sample in SAMPLES}, readers()
    read["run"](corpus / REFERENCE, corpus)  # import and compile before limits are set
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    say = sys.stdout
    print("ready", file=say, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        sample, dice = samples[case["sample"]], random.Random(f"{case['sample']}:{case['seed']}")
        place = scratch / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(corpus / sample.folder, place)
        file = dice.choice([each for each in sorted(place.glob(sample.mutates)) if each.is_file()])
        how = [mutate(file, dice)]
        if dice.random() < 0.2 and file.is_file() and not file.is_symlink():
            how.append(mutate(file, dice))
        print(json.dumps({"begin": case, "how": "+".join(how)}), file=say, flush=True)
        print(
            json.dumps({"end": case, "found": _attempt(read[sample.reader], place / sample.opens, corpus)}),
            file=say,
            flush=True,
        )


def _attempt(read, target: Path, corpus: Path) -> str:  # type: ignore[no-untyped-def]
    """Return what went wrong while reading; nothing if all is right."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(target, corpus)
    except TensortapError as error:
        return f"a message of {len(str(error)):,} characters" if len(str(error)) > LONGEST_MESSAGE else ""
    except BaseException:
        return traceback.format_exc()[-3000:]
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
