"""A checkpoint on the Hugging Face Hub, read by byte range: V4.1's headers are 12 MB of its 510 GB.

Imported late, since huggingface_hub is an extra. Every read is of one commit, whatever happens to the branch meanwhile.
Endpoint, token and offline mode are huggingface_hub's own: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from fse_convert.checkpoint.left_out import Kind, find_clutter
from fse_convert.errors import EnvironmentFailure, InvalidCheckpoint, Problem, UsageError, environment

SCHEME = "hf://"
REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
SNAPSHOT = re.compile(r"/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
"""Where huggingface_hub keeps a model of one commit in its cache."""
TIMEOUT = 30.0
"""Seconds without a byte after which a request counts as failed."""
INSTALL = "pip install 'huggingface_hub>=1.0'"


class HubFolder:
    """A model repository of the Hub at one commit."""

    workers = 16
    odd: list[str] = []  # noqa: RUF012 - nothing on the Hub is odd

    def __init__(self, address: str, endpoint: str | None = None) -> None:
        """Resolve ``hf://org/name[@revision]`` to a commit.

        Raises UsageError for an address of another form, InvalidCheckpoint where there is no such model, EnvironmentFailure
        where the Hub or the account says no.
        """
        self.repo, asked = _parsed(address)
        self._hub = _library(address)
        self._api = self._hub.HfApi(endpoint=endpoint, library_name="fse-convert")
        with _failures(address):
            self.commit: str = self._api.model_info(self.repo, revision=asked, timeout=TIMEOUT).sha
        self.label = f"{SCHEME}{self.repo}@{self.commit}"

    @cached_property
    def _listed(self) -> dict[str, int]:
        with _failures(self.label):
            entries = list(self._api.list_repo_tree(self.repo, recursive=True, revision=self.commit))
        return dict(sorted((e.path, e.size) for e in entries if isinstance(e, self._hub.hf_api.RepoFile)))

    @cached_property
    def files(self) -> dict[str, int]:
        """Every file with its size, but for `clutter`."""
        return {name: size for name, size in self._listed.items() if not find_clutter(name)}

    @cached_property
    def clutter(self) -> dict[str, Kind]:
        """What is by its name never part of a checkpoint."""
        return dict(found for name in self._listed if (found := find_clutter(name)))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range by one request; a server that ignores ranges is cut off once the bytes are there.

        Raises OSError when the Hub refuses or cannot be reached.
        """
        length = self.files[name] - offset if length is None else min(length, self.files[name] - offset)
        if length <= 0:
            return b""
        url = self._hub.hf_hub_url(self.repo, name, revision=self.commit, endpoint=self._api.endpoint)
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        try:
            return self._get(url, headers, offset, length)
        except self._hub.errors.HTTPError as e:  # the HTTP library's own: httpx or its successor
            raise OSError(f"{type(e).__name__} at {url}: {e}") from e

    def _get(self, url: str, headers: dict[str, str], offset: int, length: int) -> bytes:
        utils = self._hub.utils
        headers = {**utils.build_hf_headers(library_name="fse-convert", token=self._api.token), **headers}
        with utils.http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT) as response:
            utils.hf_raise_for_status(response)
            if response.status_code != 206 and offset:
                raise OSError(f"{url} does not serve byte ranges")
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= length:
                    break
        return bytes(content[:length])


def fetch(address: str, *, bars: bool = False) -> Path:
    """Return the folder of a checkpoint that is given as a folder or as ``hf://org/name[@revision]``.

    A model of the Hub is downloaded into huggingface_hub's own cache; what lies there is not fetched again, and is enough where the
    Hub cannot be reached. ``bars``: let huggingface_hub show its progress on stderr.
    Raises UsageError, InvalidCheckpoint or EnvironmentFailure.
    """
    if not address.startswith(SCHEME):
        return Path(address)
    repo, asked = _parsed(address)
    hub = _library(address)
    switch = hub.utils.enable_progress_bars if bars else hub.utils.disable_progress_bars
    switch()
    with environment(address), _failures(address):
        return Path(hub.snapshot_download(repo, revision=asked, library_name="fse-convert"))


def source_name(folder: Path) -> str:
    """Return how a report names a source: a folder of the Hub's cache by repository and commit, any other by its path."""
    match = SNAPSHOT.search(folder.absolute().as_posix())
    return f"{SCHEME}{match['org']}/{match['name']}@{match['commit']}" if match else str(folder)


def _parsed(address: str) -> tuple[str, str | None]:
    """Return repository and revision of an address. Raises UsageError."""
    match = REPOSITORY.fullmatch(address.removeprefix(SCHEME))
    if match is None:
        hint = "hf://org/name or hf://org/name@revision"
        raise UsageError(Problem("hub-address", f"{address!r} names no model of the Hub", "CHECKPOINT", hint))
    return match["repo"], match["revision"]


def _library(address: str) -> Any:
    """Import huggingface_hub, which is an extra. Raises EnvironmentFailure."""
    try:
        library = import_module("huggingface_hub")
        for part in ("errors", "utils"):  # attributes of the package once they are imported
            import_module(f"huggingface_hub.{part}")
    except ImportError as e:
        raise EnvironmentFailure(Problem("hub-missing", "huggingface_hub is not installed", address, INSTALL)) from e
    return library


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Turn what the Hub answers into problems with hints; what the disk refuses is left alone."""
    errors: Any = import_module("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError as e:
        hint = "accept the licence on the model's page, then: hf auth login"
        raise EnvironmentFailure(Problem("hub-gated", "access to this model must be asked for", address, hint)) from e
    except errors.RepositoryNotFoundError as e:
        hint = "check the spelling; a private model needs: hf auth login"
        raise InvalidCheckpoint(Problem("no-such-model", "no such model on the Hub", address, hint)) from e
    except errors.RevisionNotFoundError as e:
        hint = "give a branch, a tag or a commit"
        raise InvalidCheckpoint(Problem("no-such-revision", "the model has no such revision", address, hint)) from e
    except errors.OfflineModeIsEnabled as e:
        raise EnvironmentFailure(Problem("hub-offline", "HF_HUB_OFFLINE is set", address, "unset it")) from e
    except (errors.HTTPError, OSError) as e:
        if isinstance(e, OSError) and (e.filename or e.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise
        message = f"the Hub cannot be read: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"
        raise EnvironmentFailure(Problem("hub-unreachable", message, address, "check the network and HF_ENDPOINT")) from e
