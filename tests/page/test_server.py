"""The page's server: who may ask, what is refused, and what many or ended questions do to it."""

import json
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from experiments.live_page.page_command import check_port
from mistlab.core.values import InputError
from tests.page.conftest import RunningPage
from tests.page.test_questions import PROBLEM

HOSTILE = 500


def test_other_hosts_and_origins_are_refused(running: RunningPage) -> None:
    body = json.dumps({"problem": PROBLEM}).encode()
    for headers, status in (
        ({"host": "evil.example"}, 421),
        ({"host": f"127.0.0.1:{running.port + 1}"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ):
        got, content = running.send("/api/predict", body, headers)
        assert got == status, headers
        assert json.loads(content)["error"]
    own = {"origin": running.address.rstrip("/"), "sec-fetch-site": "same-origin"}
    assert running.send("/api/predict", body, own)[0] == 200


def test_answers_forbid_what_a_page_does_not_need(running: RunningPage) -> None:
    status, content = running.send("/", None, method="GET")
    assert status == 200
    assert b"http://" not in content.replace(b"http://www.w3.org", b"")
    assert running.send("/../../etc/passwd", None, method="GET")[0] == 404
    assert running.send("/%2e%2e/app.py", None, method="GET")[0] == 404
    assert running.send("/", b"{}", method="DELETE")[0] == 405


def _hostile(draw: random.Random) -> tuple[str, bytes]:
    """A question that no page would ask."""
    deep = draw.choice((70, 5_000, 100_000))
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    bad_value: Any = draw.choice(
        [None, -1, 0, 1e308, 10**30, True, [], {}, "", "\x00", "nan", "9" * 400, ["a"] * 50, "💥"]
    )
    key = draw.choice([*PROBLEM, "space", "engine", "keep_free_gib"])
    question = draw.choice(["predict", "choices", "search", "compare", "paste", "export", "gains"])
    contents = [
        draw.randbytes(draw.randrange(1, 300)),
        b"[" * deep,
        b'{"a":' * deep,
        b'{"problem": ' + b"[" * 50 + b"]" * 50 + b"}",
        json.dumps({"problem": {**PROBLEM, key: bad_value}, "plan": {}}).encode(),
        json.dumps({"problem": bad_value, "plan": bad_value, "text": bad_value}).encode(),
        json.dumps({"problem": {**PROBLEM, "model": bomb}, "text": bomb}).encode(),
        json.dumps({"plan": bomb, "first": bomb, "text": "{" * 9000}).encode(),
        json.dumps({"plan": {"workload": {"model": "/etc/passwd"}}}).encode(),
        b'{"problem": NaN}',
        b'"text"',
        b"\xff\xfe{}",
        b"x" * ((1 << 19) + draw.randrange(1, 1000)),
    ]
    return question, draw.choice(contents)


def _resident_bytes(process: int) -> int:
    """Resident memory of a process and of its children."""
    tree = [process]
    for task in Path(f"/proc/{process}/task").iterdir():
        tree += [int(child) for child in (task / "children").read_text().split()]
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in tree]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc tells of memory")
def test_hostile_questions_are_refused_and_leave_nothing(running: RunningPage) -> None:
    draw = random.Random(7)
    # Processes that still start would count as growth.
    assert running.ask("predict", {"problem": PROBLEM})[0] == 200
    assert running.ask("choices", {"problem": PROBLEM})[0] == 200
    assert running.ask("search", {"problem": PROBLEM, "seconds": 0})[0] == 200
    before = _resident_bytes(running.process.pid)
    seen: Counter[int] = Counter()
    for _ in range(HOSTILE):
        question, content = _hostile(draw)
        status, answer = running.send(f"/api/{question}", content)
        # A search begins its answer before it has read the problem.
        told = json.loads(answer.splitlines()[-1])
        assert told.get("error"), (question, content[:200])
        assert status in (200, 400, 413), (status, content[:200])
        assert len(told["error"]) < 2_000
        assert "Traceback" not in told["error"]
        seen[status] += 1
    assert seen[400] > HOSTILE / 2
    assert _resident_bytes(running.process.pid) - before < 200e6
    assert running.ask("predict", {"problem": PROBLEM})[0] == 200


def test_a_hundred_questions_at_once_are_answered_or_told_to_wait(running: RunningPage) -> None:
    def ask(number: int) -> int:
        batch = 16 * (1 + number % 8)
        return running.ask("predict", {"problem": {**PROBLEM, "global_batch": batch}})[0]

    with ThreadPoolExecutor(130) as threads:
        seen = Counter(threads.map(ask, range(130)))
    assert seen[200] >= 100
    assert seen.keys() <= {200, 503}


def test_a_process_that_dies_is_replaced(running: RunningPage) -> None:
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)
    time.sleep(0.2)
    status, answer = running.ask("predict", {"problem": PROBLEM})
    if status != 200:
        assert status == 504
        assert answer["error"]
    assert running.ask("predict", {"problem": PROBLEM})[0] == 200


def test_searches_that_are_given_up_do_not_mix_with_the_next(running: RunningPage) -> None:
    """As a slider that moves on while its search runs."""
    body = json.dumps({"problem": {**PROBLEM, "model": "gpt-oss-20b"}, "seconds": 30}).encode()
    small = {**PROBLEM, "model": "gpt3-1.3b", "nodes": 1, "global_batch": 32}
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/api/search", body, headers)
        assert json.loads(connection.getresponse().readline())["event"] == "progress"
        connection.close()
        _, content = running.send(
            "/api/search", json.dumps({"problem": small, "seconds": 30}).encode()
        )
        answer = json.loads(content.splitlines()[-1])["answer"]
        assert answer["status"] == "OPTIMAL"
        assert answer["figures"]["job"]["workload"]["model"] == "gpt3-1.3b"


def test_an_unknown_question_is_refused(running: RunningPage) -> None:
    assert running.ask("eval", {})[0] == 404


def test_a_port_in_use_names_the_next_free_one(running: RunningPage) -> None:
    with pytest.raises(InputError, match=r"is in use.*give --port \d+"):
        check_port(running.port)
    with pytest.raises(InputError, match="is not a port"):
        check_port(0)
