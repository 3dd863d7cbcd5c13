"""The Hugging Face cache, and downloads from a stub of the Hub on the loopback interface."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from spark_model.errors import ModelNotFoundError
from spark_model.hub import RepoReference, _wanted_files, parse_repo_reference
from spark_model.reference import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"


def cache_model(cache: Path, files: dict[str, bytes], *, repo: str = REPO, commit: str = COMMIT) -> Path:
    """A cached snapshot of `files` with a ref `main`, laid out as huggingface_hub does."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "blobs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        blob = root / "blobs" / hashlib.sha1(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    return snapshot


MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{ }"}


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.usefixtures("no_sockets")
class TestCache:
    def test_hit(self, tmp_path: Path) -> None:
        snapshot = cache_model(tmp_path, MODEL)
        checkpoint = resolve_model(REPO, cache_dir=tmp_path)
        assert checkpoint.kind == "safetensors" and checkpoint.name == REPO and checkpoint.path == snapshot
        assert resolve_model(f"{REPO}@{COMMIT}", cache_dir=tmp_path).path == snapshot
        assert resolve_model(REPO, cache_dir=tmp_path, allow_download=True).path == snapshot

    def test_revision(self, tmp_path: Path) -> None:
        cache_model(tmp_path, MODEL)
        other = cache_model(tmp_path, MODEL, commit="f" * 40)
        (tmp_path / "models--org--tiny" / "refs" / "v2").write_text("f" * 40)
        assert resolve_model(f"{REPO}@v2", cache_dir=tmp_path).path == other
        assert resolve_model(f"{REPO}@v2", cache_dir=tmp_path).name == f"{REPO}@v2"
        with pytest.raises(ModelNotFoundError, match=r"hf download org/tiny --revision v3"):
            resolve_model(f"{REPO}@v3", cache_dir=tmp_path)

    def test_recipe_pins_a_revision(self, tmp_path: Path) -> None:
        snapshot = cache_model(tmp_path / "cache", MODEL, commit="e" * 40)
        recipe = tmp_path / "r.yaml"
        recipe.write_text(f'recipe_version: "2"\nmodel: {REPO}\nmodel_revision: {"e" * 40}\nruntime: spark\n')
        assert resolve_model(str(recipe), cache_dir=tmp_path / "cache").path == snapshot

    def test_gguf_repository(self, tmp_path: Path) -> None:
        snapshot = cache_model(tmp_path, {"tiny.gguf": b"GGUF"})
        assert resolve_model(REPO, cache_dir=tmp_path).path == snapshot / "tiny.gguf"

    def test_without_weights_differs_from_absent(self, tmp_path: Path) -> None:
        cache_model(tmp_path, {"config.json": b"{}"})
        with pytest.raises(ModelNotFoundError) as partial:
            resolve_model(REPO, cache_dir=tmp_path)
        with pytest.raises(ModelNotFoundError) as absent:
            resolve_model("org/tini", cache_dir=tmp_path)
        assert str(partial.value).startswith(f"model {REPO} is in the cache without all of its files\n  ")
        assert str(partial.value).endswith("\n  hint: run `hf download org/tiny`, or add --allow-download")
        assert str(absent.value).startswith("model org/tini is not here. Did you mean org/tiny?\n  no recipe")
        assert str(absent.value).endswith(
            f"\n  no model org/tini in the cache {tmp_path}\n"
            "  hint: run `hf download org/tini`, or add --allow-download"
        )

    def test_missing_shard(self, tmp_path: Path) -> None:
        index = json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}).encode()
        cache_model(tmp_path, {"config.json": b"{}", "model.safetensors.index.json": index})
        with pytest.raises(ModelNotFoundError, match=r"1 of 1 files are missing: model-00001-of-00001\.safetensors"):
            resolve_model(REPO, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "{}/a"}, "a"),
        ({"HF_HOME": "{}/b"}, "b/hub"),
        ({"HF_HOME": "{}/b", "HF_HUB_CACHE": "{}/a"}, "a"),
        ({"HOME": "{}/c"}, "c/.cache/huggingface/hub"),
    ],
)
def test_cache_places(environment: dict[str, str], folder: str, tmp_path: Path) -> None:
    snapshot = cache_model(tmp_path / folder, MODEL)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment = clean | {key: value.format(tmp_path) for key, value in environment.items()}
    code = f"from spark_model.reference import resolve_model; print(resolve_model({REPO!r}).path)"
    result = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == str(snapshot)


class StubHub(BaseHTTPRequestHandler):
    """As much of the Hub's HTTP interface as a snapshot download asks for: one repository, one revision."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def log_message(self, format: str, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        StubHub.requests.append(f"{self.command} {path}")
        if path.startswith(f"/api/models/{REPO}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            self.send(json.dumps({"_id": "1", "id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self.send(json.dumps(entries).encode())
        elif path.startswith(f"/{REPO}/resolve/") and path.rsplit("/", 1)[1] in self.files:
            content = self.files[path.rsplit("/", 1)[1]]
            self.send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    def send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StubHub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    StubHub.requests = []
    monkeypatch.setenv("STUB_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield StubHub
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_in_child(cache: Path, reference: str, *, allow_download: bool) -> tuple[int, str]:
    """The exit code and the path or the message; a child, because huggingface_hub reads its endpoint at import."""
    code = (
        "import sys; from pathlib import Path; from spark_model.reference import resolve_model\n"
        "from spark_model.errors import ModelError\n"
        "try:\n"
        f"    path = resolve_model({reference!r}, cache_dir=Path({str(cache)!r}), allow_download={allow_download}).path\n"
        "except ModelError as error:\n"
        "    print(error); sys.exit(1)\n"
        "print(path)"
    )
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    environment = clean | {
        "HF_ENDPOINT": os.environ["STUB_ENDPOINT"],
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cache / "home"),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    return result.returncode, result.stdout.strip() or result.stderr


def test_download_only_when_allowed(hub: type[StubHub], tmp_path: Path) -> None:
    hub.files = MODEL | {"pytorch_model.bin": b"pickle", "README.md": b"text"}
    status, message = resolve_in_child(tmp_path, REPO, allow_download=False)
    assert status == 1 and "or add --allow-download" in message
    assert hub.requests == []
    status, path = resolve_in_child(tmp_path, REPO, allow_download=True)
    assert status == 0, path
    assert Path(path) == tmp_path / "models--org--tiny" / "snapshots" / COMMIT
    assert {entry.name: entry.read_bytes() for entry in Path(path).iterdir()} == MODEL
    assert hub.requests
    hub.requests.clear()
    assert resolve_in_child(tmp_path, REPO, allow_download=True) == (0, path)
    assert hub.requests == []  # a whole model in the cache is used as it is


def test_download_completes_a_partial_model(hub: type[StubHub], tmp_path: Path) -> None:
    cache_model(tmp_path, {"config.json": b"{}"})
    hub.files = MODEL
    status, path = resolve_in_child(tmp_path, REPO, allow_download=True)
    assert status == 0, path
    assert (Path(path) / "model.safetensors").read_bytes() == b"weights"


def test_download_failures(hub: type[StubHub], tmp_path: Path) -> None:
    hub.files = {"README.md": b"text"}
    status, message = resolve_in_child(tmp_path, REPO, allow_download=True)
    assert (status, message) == (1, f"{REPO}: the repository has no safetensors and no GGUF")
    status, message = resolve_in_child(tmp_path, "org/absent", allow_download=True)
    assert status == 1 and message.startswith("org/absent: cannot be downloaded: ") and "\n" not in message


def test_download_with_nobody_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_ENDPOINT", "http://127.0.0.1:9")
    status, message = resolve_in_child(tmp_path, REPO, allow_download=True)
    assert status == 1 and message.startswith(f"{REPO}: cannot be downloaded: "), message


def test_wanted_files() -> None:
    reference = RepoReference(REPO)
    small = ["config.json", "tokenizer.model", "chat_template.jinja"]
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    other = ["consolidated.safetensors", "original/model.safetensors", "x.bin", "m.gguf", "README.md"]
    assert _wanted_files(reference, small + weights + other) == small + weights
    splits = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert _wanted_files(reference, [*splits, "mmproj.gguf", "config.json"]) == ["config.json", *splits]
    with pytest.raises(
        ModelNotFoundError, match=r"2 GGUF models: a\.gguf, b\.gguf\n  hint: fetch one with `hf download"
    ):
        _wanted_files(reference, ["a.gguf", "b.gguf"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/name", RepoReference("org/name")),
        ("org/name@v1.0", RepoReference("org/name", "v1.0")),
        ("org/name@refs/pr/1", RepoReference("org/name", "refs/pr/1")),
        ("name", None),
        ("a/b/c", None),
        ("../name", None),
        ("org/..", None),
        ("org/name@../../x", None),
        ("org/a--b", None),
        ("-x/name", None),
        ("org/na me", None),
    ],
)
def test_parse_repo_reference(text: str, wanted: RepoReference | None) -> None:
    assert parse_repo_reference(text) == wanted
