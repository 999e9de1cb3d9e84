"""Two processes that train in one folder."""

import signal
from dataclasses import replace

from drills import drill
from drills.runs import TINY, gone_on, harm, reference, refusal, train
from processes import wait_for
from ripple_lab.train.recorder import METRICS

LONG = replace(TINY, epochs=100_000)


@drill("two processes in one folder", "one trains; the other names it and leaves its files alone")
def sharing(folder, short):
    yield from late(folder, 1 if short else 5)
    yield from together(folder, 1 if short else 10)


def late(folder, count):
    whole = reference(folder)
    for number in range(count):
        for words in ([], ["--resume"]):
            case = f"started later, {' '.join(words) or 'without --resume'}"
            run = folder / f"late-{number}-{len(words)}"
            first = train(run, recipe=LONG)
            wait_for((run / METRICS).exists, 300)
            before = (run / "environment.json").read_bytes()
            second = train(run, *words, recipe=LONG, logs="second")
            wrong = refusal(second, run, f"process {first.process.pid} on ")
            if (run / "environment.json").read_bytes() != before:
                wrong = "it wrote into the folder"
            first.send_signal(signal.SIGKILL)
            first.wait()
            yield case, wrong
    for number in range(count):  # the lock of a process that is dead holds nobody up
        run = folder / f"dead-{number}"
        first = train(run)
        wait_for((run / METRICS).exists, 300)
        first.send_signal(signal.SIGKILL)
        first.wait()
        yield "started right after the other was killed, --resume", gone_on(run, whole)


def together(folder, count):
    whole = folder / "reference"
    for number in range(count):
        run = folder / f"together-{number}"
        both = [train(run, "--resume", logs=name) for name in ("one", "two")]
        codes = [process.wait(300) for process in both]
        wrong = harm(run, whole)
        if codes == [0, 0]:  # the second began when the first had ended
            ended = [process for process in both if "has ended" in process.output.read_text()]
            wrong = wrong or ("" if ended else "both trained")
        else:
            first, second = both if codes[0] == 0 else reversed(both)
            wrong = wrong or refusal(second, run, f"process {first.process.pid} on ")
        yield "started at the same time, --resume", wrong
