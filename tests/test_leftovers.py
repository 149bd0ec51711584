"""What killed processes leave is known as ours, and goes at the next start; what is another's or in use, stays."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

POOL = """
import multiprocessing.util, sys, time
from qupel.engine.workers import Pool
if __name__ == "__main__":
    with Pool(1):
        print(multiprocessing.util.get_temp_dir(), flush=True)
        time.sleep(float(sys.argv[1]))
"""
LIGHT = """
import multiprocessing.util, sys, time
from qupel.engine.scratch import hold_multiprocessing
hold_multiprocessing()
print(multiprocessing.util.get_temp_dir(), flush=True)
time.sleep(float(sys.argv[1]))
"""


@contextmanager
def begun(script, folder, *arguments):
    """(process, its first line); whatever happens, it is ended."""
    path = folder / f"script-{hash(script)}.py"  # workers of a pool read it again
    path.write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    try:
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_folders_of_multiprocessing(tmp_path):
    """Killed, a pool's folder is left; the next pool removes it, but not that of one that lives, nor any other's."""
    there = tmp_path / "tmp"
    (there / "pymp-another").mkdir(parents=True)
    with begun(POOL, tmp_path, "600") as (killed, left), begun(LIGHT, tmp_path, "600") as (_, live):
        killed.kill()
        killed.wait()
        before = {path.name for path in there.iterdir()}
        assert {os.path.dirname(left), os.path.dirname(live)} == {
            str(there / name) for name in before if name.startswith("qupel-")
        }
        with begun(LIGHT, tmp_path, "0") as (third, _):
            third.wait(60)
        assert not os.path.exists(left)
        assert os.path.exists(live)
    assert (there / "pymp-another").exists()
    assert len([name for name in before if name.startswith("pymp-")]) == 1


def test_a_folder_of_another_user_or_a_link_stays(tmp_path, monkeypatch):
    from qupel.engine import scratch

    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    for name in ("qupel-ours", "target", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "qupel-link").symlink_to(tmp_path / "target")
    (tmp_path / "qupel-file").touch()
    assert scratch.abandoned() == [tmp_path / "qupel-ours"]
    if os.getuid() == 0:  # only root can make a folder of another user
        os.chown(tmp_path / "qupel-ours", 12345, 12345)
        assert scratch.abandoned() == []


def test_creators_and_sweepers_at_once(tmp_path):
    """Eight processes make and sweep folders at the same time: none loses the one it has."""
    script = """
import sys
from qupel.engine import scratch
for _ in range(30):
    scratch._HELD.clear()
    mine = scratch.own_folder()
    for folder in scratch.abandoned():
        scratch.remove(folder)
    assert mine.exists(), mine
"""
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    started = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(8)]
    assert [process.wait(60) for process in started] == [0] * 8
