"""Recorded prompts: what is kept, what is not, and by whom it can be read."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import read_prompts
from ssd_runtime.serving.record import Recorder, read_recorder

ASKED = [("system", "Be brief."), ("user", "Write to ada@example.org, or\nring 0049 30 1234.")]


def test_a_recorded_file_is_a_prompt_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    first = Recorder(path)
    assert first.add(ASKED)
    first.close()
    assert not first.add(ASKED)
    second = Recorder(path)
    assert second.add([("user", "Grüße \U0001f600")], domain="letters")
    prompts = read_prompts(path)
    assert [prompt.messages for prompt in prompts] == [tuple(ASKED), (("user", "Grüße \U0001f600"),)]
    assert [prompt.domain for prompt in prompts] == [None, "letters"]
    assert len({prompt.id for prompt in prompts}) == 2
    assert (first.recorded, second.recorded) == (1, 1)


def test_what_would_make_the_file_unreadable_is_omitted(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    recorder = Recorder(path)
    assert not recorder.add([])
    assert not recorder.add([("user", " \n")])
    assert not recorder.add([("user", "half \ud83d")])
    assert recorder.add(ASKED)
    assert len(read_prompts(path)) == recorder.recorded == 1


def test_a_line_that_was_cut_off_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    path.chmod(0o644)
    Recorder(path).add(ASKED)
    assert len(read_prompts(path)) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    Recorder(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_the_pattern_matches_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    Recorder(path, redact=re.compile(r"\S+@\S+\b|\d[\d ]+\d")).add(ASKED)
    [prompt] = read_prompts(path)
    assert prompt.messages[1][1] == "Write to [redacted], or\nring [redacted]."
    assert "ada" not in path.read_text()


def test_a_share_is_recorded_at_random(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "mine.jsonl", share=0.1)
    for _ in range(2000):
        recorder.add(ASKED)
    assert 110 < recorder.recorded < 290  # 6.7 standard deviations
    assert len(read_prompts(recorder.path)) == recorder.recorded
    none = Recorder(tmp_path / "none.jsonl", share=0.0)
    assert not any(none.add(ASKED) for _ in range(50))


def test_threads_and_recorders_of_one_file_mix_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    recorders = [Recorder(path), Recorder(path)]
    texts = [f"{place} " + "long " * 3000 for place in range(8)]

    def record(place: int) -> None:
        for _ in range(20):
            recorders[place % 2].add([("user", texts[place])])

    threads = [threading.Thread(target=record, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(prompt.messages[0][1] for prompt in read_prompts(path)) == sorted(texts * 20)


def test_a_full_disk_ends_the_recording_and_not_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(Path("/dev/full"))
    assert not recorder.add(ASKED)
    assert not recorder.add(ASKED)
    assert capsys.readouterr().err == "warning: recording in /dev/full has ended (No space left on device)\n"


def test_options_build_the_recorder_and_it_says_what_it_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_recorder(None, None, None) is None
    assert capsys.readouterr().err == ""
    path = tmp_path / "mine.jsonl"
    recorder = read_recorder(path, 0.25, "[0-9]+")
    assert recorder is not None
    assert recorder.share == 0.25
    said = capsys.readouterr().err
    assert said.startswith("note: recording 0.25 of all prompts")
    assert str(path) in said
    assert "'[0-9]+'" in said


WRONG = {
    "a share of nothing": ((None, 0.5, None), "--record-share: nothing is recorded"),
    "redaction of nothing": ((None, None, "a"), "--record-redact: nothing is recorded"),
    "no pattern": (("mine.jsonl", None, "("), "--record-redact: '(' is no regular expression"),
    "a folder": ((".", None, None), "--record: . cannot be written (Is a directory)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (path, share, pattern), says = WRONG[case]
    with pytest.raises(UserError, match=re.escape(says)):
        read_recorder(None if path is None else Path(path), share, pattern)
    assert not list(tmp_path.iterdir())
