"""`ssd-serve` as a user runs it: started, asked, told to reload and to stop, and given what is wrong."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ssd_profiles.prompts import read_prompts
from tests.commands import COMPILE, SERVE, command
from tests.compiled import seeded
from tests.folders import TEXTS
from tests.ports import unused_port
from tests.served import log_of, open_requests, post, send, server
from tests.serving import TOOL_TEMPLATE
from tests.waiting import wait_until


def test_open_requests_end_when_the_server_is_told_to_stop(room: Path) -> None:
    """A stream and a whole answer are complete, and nobody new gets in."""
    with server(room) as (process, address):
        expected = json.load(post(address, max_tokens=250))["choices"][0]["message"]["content"]
        answers = list[str]()
        whole = threading.Thread(
            target=lambda: answers.append(json.load(post(address, max_tokens=250))["choices"][0]["message"]["content"])
        )
        stream = post(address, max_tokens=250, stream=True)
        whole.start()
        first = stream.readline()
        wait_until(lambda: open_requests(address) == 2, "both requests are open")
        process.send_signal(signal.SIGTERM)
        text = (first + stream.read()).decode()
        whole.join()
        assert process.wait(30) == 0
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert text.endswith("data: [DONE]\n\n")
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected
        assert answers == [expected]
        with pytest.raises(ConnectionError):
            post(address)


def test_options_reach_the_server(room: Path) -> None:
    """Recorded requests are a file of prompts, and those that do not end within the grace are told so."""
    (room / "tools.jinja").write_text(TOOL_TEMPLATE)
    options = ["--chat-template", "tools.jinja", "--allow-origin", "https://a.example", "--kv-memory", "850K"]
    options += ["--record", "recorded.jsonl", "--api-key", "secret", "--grace", "0"]
    with server(room, *options) as (process, address):

        def ask(path: str, **fields: Any) -> http.client.HTTPResponse:
            body = json.dumps({"max_tokens": 2, **fields}).encode()
            return send(address, path, body, Authorization="Bearer secret")

        def chat(content: Any, **fields: Any) -> http.client.HTTPResponse:
            return ask("/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields)

        assert post(address, max_tokens=2).status == 401
        tool = {"type": "function", "function": {"name": "loaves"}}
        assert chat([{"type": "text", "text": TEXTS[0]}], tools=[tool]).status == 200
        assert ask("/v1/completions", prompt=[TEXTS[1], TEXTS[2]]).status == 200
        assert chat("refused", temperature=9).status == 400
        connection = http.client.HTTPConnection(address, timeout=60)
        headers = {"Origin": "https://a.example", "Authorization": "Bearer secret"}
        connection.request("GET", "/v1/models", headers=headers)
        response = connection.getresponse()
        assert response.getheader("access-control-allow-origin") == "https://a.example"
        context = json.load(response)["data"][0]["max_model_len"]
        assert 256 <= context < 512
        response = chat(TEXTS[0] * 20)
        assert response.status == 400
        assert f"at most {context - 1}" in json.load(response)["error"]["message"]
        stream = chat("Go on", max_tokens=200, n=8, stream=True)
        stream.readline()
        process.send_signal(signal.SIGINT)
        text = stream.read().decode()
        assert process.wait(30) == 0
    assert json.loads(text.split("data: ")[-2])["error"]["code"] == "shutting_down"
    assert text.endswith("data: [DONE]\n\n")
    recorded = [prompt.messages for prompt in read_prompts(room / "recorded.jsonl")]
    assert recorded == [(("user", text),) for text in (*TEXTS, "Go on")]


def test_nobody_gets_in_before_the_model_is_there(room: Path) -> None:
    """So a health check that connects is no sign of life while the model is loaded."""
    port = unused_port()
    # To import all there is takes a while.
    code = f"from {SERVE} import main; main()"
    command = [sys.executable, "-c", code, "--model", "model", "--port", str(port), "--strategy", "plain"]
    environment = {**os.environ, "SSD_CACHE": seeded(room / "cache"), "HF_HUB_OFFLINE": "1"}
    with (room / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=room, env=environment, stderr=log)
    try:
        logged(room, "loading model; requests are taken on", 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        logged(room, "serving model on", 1)
        assert post(f"127.0.0.1:{port}", max_tokens=2).status == 200
    finally:
        process.kill()
        process.wait()


def logged(folder: Path, words: str, times: int) -> str:
    """The rest of the line in which a server logs these words for the last of so many times."""
    line = re.compile(f"{words}(.*)\n")
    wait_until(lambda: len(line.findall(log_of(folder))) >= times, f"{words!r} is logged", seconds=120)
    return str(line.findall(log_of(folder))[-1])


def test_a_server_learns_from_its_own_traffic_and_loses_no_request(room: Path) -> None:
    """Requests are recorded, a bundle is compiled from them under load, and the server takes it up."""
    shutil.copytree(room / "bundle", room / "served")
    questions = [" ".join(TEXTS[1].split()[i % 6 :]) + f" {i}" for i in range(14)]
    with server(room, "--artifact", "served", "--reload", "--record", "mine.jsonl", strategy="auto") as (
        process,
        address,
    ):

        def answer(question: str) -> str:
            response = post(address, messages=[{"role": "user", "content": question}], max_tokens=24)
            assert response.status == 200
            return str(json.load(response)["choices"][0]["message"]["content"])

        expected = {question: answer(question) for question in questions}
        done = threading.Event()
        answers = list[tuple[str, str]]()

        def load() -> None:
            while not done.wait(0.2):  # the compile has most of the processor
                for question in questions[:4]:
                    answers.append((question, answer(question)))

        loading = threading.Thread(target=load)
        loading.start()
        traffic = (room / "mine.jsonl").read_text()
        (room / "traffic.jsonl").write_text(traffic)
        compiling = ("--model", "model", "--domain-file", "mine=traffic.jsonl", "--out", "served", "--device", "cpu")
        compiled = command(room, COMPILE, *compiling, "--evaluations", "8")
        assert compiled.returncode == 0, compiled.stderr
        taken_up = logged(room, "took up", 1)
        before = len(answers)
        wait_until(lambda: len(answers) >= before + 8 or not loading.is_alive(), "requests go on")
        process.send_signal(signal.SIGHUP)
        again = logged(room, "took up", 2)
        done.set()
        loading.join()
    assert again == taken_up
    assert "mine" in taken_up
    assert "rivers" not in taken_up
    assert len(answers) >= before + 8
    assert all(text == expected[question] for question, text in answers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model: none given; give a model, or a --bundle that names one"),
        (["--model", "model", "--reload"], "--reload: there is no folder to look at again"),
        (["--model", "nowhere/at/all"], "nowhere/at/all: no such folder"),
        (["--model", "nowhere", "--allow-strategies", "nonsense"], "--allow-strategies"),
        (["--model", "nowhere", "--allow-strategies", "clasp,knn"], "--allow-strategies"),
        (["--model", "model", "--strategy", "knn"], "--strategy knn: needs a bundle"),
        (["--model", "model", "--api-key", ""], "--api-key: a key is text"),
        (["--model", "model", "--host", "192.0.2.1"], "--host, --port: 192.0.2.1:8000 cannot be listened on"),
        (["--model", "model", "--record-share", "0.5"], "--record-share: nothing is recorded"),
        (["--model", "model", "--kv-memory", "much"], "--kv-memory: expected a size such as 2G"),
        (["--model", "model", "--chat-template", "nowhere.jinja"], "--chat-template: nowhere.jinja cannot be read"),
        (["--model", "model", "--ray", "auto"], "--ray: a cluster serves replicas; give --replicas N too"),
        (["--model", "model", "--replicas", "2:1"], "--replicas: expected N or MIN:MAX from 1 to 1000, got '2:1'"),
        (
            ["--model", "model", "--replicas", "999", "--ray", "local"],
            "--replicas: 999 of 1 threads each need 999 cores",
        ),
        (["--model", "model", "--replicas", "2", "--record", "x"], "--record: replicas on other hosts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_line(room: Path, options: list[str], message: str) -> None:
    done = command(room, SERVE, *options)
    assert done.returncode == 2
    *notes, error = done.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert all(" INFO loading " in note for note in notes), "what it was about to do, and one line of error"


def test_a_port_that_is_taken_is_said_at_once(room: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = command(room, SERVE, "--model", "model", "--port", port, "--record", "new.jsonl")
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr
    assert not (room / "new.jsonl").exists()
