"""A checkpoint on the Hugging Face Hub, read by byte range: V4.1's headers are 12 MB of its 510 GB.

Imported late, since huggingface_hub is an extra. Every read is of one commit, whatever happens to the branch meanwhile.
Endpoint, token and offline mode are huggingface_hub's own: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any

from fse_convert.checkpoint.left_out import Kind, find_clutter
from fse_convert.errors import EnvironmentFailure, InvalidCheckpoint, Problem, UsageError

SCHEME = "hf://"
REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
TIMEOUT = 30.0
"""Seconds without a byte after which a request counts as failed."""
INSTALL = "pip install 'fse-convert[hub]'"


class HubFolder:
    """A model repository of the Hub at one commit."""

    workers = 16
    odd: list[str] = []  # noqa: RUF012 - nothing on the Hub is odd

    def __init__(self, address: str, endpoint: str | None = None) -> None:
        """Resolve ``hf://org/name[@revision]`` to a commit.

        Raises UsageError for an address of another form, InvalidCheckpoint where there is no such model, EnvironmentFailure
        where the Hub or the account says no.
        """
        match = REPOSITORY.fullmatch(address.removeprefix(SCHEME))
        if match is None:
            hint = "hf://org/name or hf://org/name@revision"
            raise UsageError(Problem("hub-address", f"{address!r} names no model of the Hub", "CHECKPOINT", hint))
        try:
            self._hub: Any = import_module("huggingface_hub")
        except ImportError as e:
            raise EnvironmentFailure(Problem("hub-missing", "huggingface_hub is not installed", address, INSTALL)) from e
        self._errors: Any = import_module("huggingface_hub.errors")
        self.repo, self.asked = match["repo"], match["revision"]
        self.label = address
        self._api = self._hub.HfApi(endpoint=endpoint, library_name="fse-convert")
        with self._failures():
            self.commit: str = self._api.model_info(self.repo, revision=self.asked, timeout=TIMEOUT).sha

    @cached_property
    def _listed(self) -> dict[str, int]:
        with self._failures():
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
        except self._errors.HTTPError as e:  # the HTTP library's own: httpx or its successor
            raise OSError(f"{type(e).__name__} at {url}: {e}") from e

    def _get(self, url: str, headers: dict[str, str], offset: int, length: int) -> bytes:
        utils: Any = import_module("huggingface_hub.utils")
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

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what the Hub answers into problems with hints."""
        errors = self._errors
        try:
            yield
        except errors.GatedRepoError as e:
            hint = "accept the licence on the model's page, then: hf auth login"
            raise EnvironmentFailure(Problem("hub-gated", "access to this model must be asked for", self.label, hint)) from e
        except errors.RepositoryNotFoundError as e:
            hint = "check the spelling; a private model needs: hf auth login"
            raise InvalidCheckpoint(Problem("no-such-model", "no such model on the Hub", self.label, hint)) from e
        except errors.RevisionNotFoundError as e:
            message = f"no revision {self.asked!r}"
            raise InvalidCheckpoint(Problem("no-such-revision", message, self.label, "give a branch, a tag or a commit")) from e
        except errors.OfflineModeIsEnabled as e:
            raise EnvironmentFailure(Problem("hub-offline", "HF_HUB_OFFLINE is set", self.label, "unset it")) from e
        except (errors.HTTPError, OSError) as e:
            message = f"the Hub cannot be read: {type(e).__name__}: {e}"
            raise EnvironmentFailure(Problem("hub-unreachable", message, self.label, "check the network and HF_ENDPOINT")) from e
